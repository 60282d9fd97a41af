"""Hardware profiles: the list, and one with its sources."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from predictor.hardware import DEFAULT_HARDWARE, PROVENANCE_ORDER, Group, HardwareProfile
from shardopt.report.console import heading, line, show, table
from shardopt.report.words import KIND_WORDS, percent

_NOT_CONSTANTS = ("provenance", "rel_error", "law")


def hardware_object(profile: HardwareProfile) -> dict[str, Any]:
    """One profile for ``--json``: all keys of its file, under the names of the file."""
    return profile.model_dump(mode="json", by_alias=True)


def show_list(console: Console, profiles: Sequence[HardwareProfile]) -> None:
    """A row a profile, with the groups of each provenance."""
    heading(console, "Hardware profiles", "shipped with shardopt; a file path is one too")
    made = table(
        [
            ("name", "left"),
            ("device", "fold"),
            ("HBM GiB", "right"),
            ("GPUs/host", "right"),
            ("NVLink", "right"),
            ("constants", "fold"),
        ]
    )
    for profile in profiles:
        default = " *" if profile.name == DEFAULT_HARDWARE else ""
        made.add_row(
            profile.name + default,
            profile.title,
            f"{profile.hbm_gib:g}",
            str(profile.gpus_per_host),
            str(profile.nvlink_domain),
            _kinds(profile),
        )
    show(console, made)
    line(
        console,
        f"  * the default; 'shardopt hardware {DEFAULT_HARDWARE}' shows one with its sources",
    )


def _kinds(profile: HardwareProfile) -> str:
    """The commonest provenance, then the groups of every other: ``derived; published: gemm``."""
    kinds = {name: profile.group_kind(name) for name in profile.groups}
    common = max(PROVENANCE_ORDER, key=list(kinds.values()).count)
    parts: list[str] = [common]
    for kind in PROVENANCE_ORDER:
        groups = [name for name, other in kinds.items() if other == kind != common]
        if groups:
            parts.append(f"{kind}: {', '.join(groups)}")
    return "; ".join(parts)


def show_profile(console: Console, profile: HardwareProfile) -> None:
    """Every constant with the unit in its name, group by group, and where it comes from."""
    console.print()
    console.print(Text.assemble((profile.name, "bold"), f"  {profile.title}"))
    line(
        console,
        f"{profile.hbm_gib:g} GiB HBM and {profile.ddr_gib:g} GiB host memory per rank, "
        f"{profile.gpus_per_host} per host, NVLink domain of {profile.nvlink_domain}, "
        f"{profile.sms} SMs",
    )
    for name, group in profile.groups.items():
        _show_group(console, name, group)


def _show_group(console: Console, name: str, group: Group) -> None:
    origin = group.provenance
    aside = f"{KIND_WORDS[origin.kind]}; times within about {percent(group.rel_error)} (1 sigma)"
    heading(console, name, aside)
    details = [origin.source.strip()]
    if origin.versions:
        details.append(f"versions: {origin.versions}")
    if origin.date:
        details.append(f"date: {origin.date}")
    if origin.n is not None:
        details.append(f"rows: {origin.n}")
    details += [f"{what} from {low:g} to {high:g}" for what, (low, high) in origin.range.items()]
    show(console, Text("; ".join(" ".join(d.split()) for d in details), style="italic"))
    made = table([("constant", "left"), ("value", "fold")])
    for key, value in group.model_dump(mode="json").items():
        if key not in _NOT_CONSTANTS:
            made.add_row(key, _value(value))
    show(console, made)


def _value(value: object) -> str:
    if isinstance(value, dict):
        kept = {k: v for k, v in value.items() if k != "source" and v not in (None, {})}
        return ", ".join(f"{k} {_value(v)}" for k, v in kept.items())
    if isinstance(value, list):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)
