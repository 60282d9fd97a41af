"""Hardware profiles: the list, and one with its sources, ranges and known errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from predictor.hardware.loader import DEFAULT_HARDWARE
from predictor.hardware.schema import PROVENANCE_ORDER, Group, HardwareProfile, KnownError
from shardopt.formatting import KIND_WORDS, percent, plural
from shardopt.report.console import heading, line, show, table

TORCHREC = "TorchRec"
_NOT_VALIDATED = "not validated"
_NOT_CONSTANTS = ("provenance", "rel_error", "law")


def hardware_object(profile: HardwareProfile) -> dict[str, Any]:
    """One profile for ``--json``.

    Keys: all of its file, and ``origins``: group -> what gives it. ``known_error`` (of whole
    iterations, a list) and ``provenance.error`` (of a group) hold ``suite``, ``rows``, ``n``, and
    ``mean`` and ``geomean`` as fractions; an empty list and null say that nothing is validated.
    """
    return {**profile.model_dump(mode="json", by_alias=True), "origins": profile.origins}


def show_list(console: Console, profiles: Sequence[HardwareProfile]) -> None:
    """One row per profile, with the groups of each provenance."""
    heading(console, "Hardware profiles", "shipped with shardopt; a path to a profile works too")
    made = table("<name", "~device", ">HBM GiB", ">GPUs/host", ">NVLink", "~constants")
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
        f"  * the default. `shardopt hardware {DEFAULT_HARDWARE}` shows it with its sources.",
    )
    _show_errors(console, profiles)


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


def _show_errors(console: Console, profiles: Sequence[HardwareProfile]) -> None:
    aside = "mean absolute error and number of rows; whatever is not listed is not validated"
    heading(console, "Known errors", aside)
    made = table("<name", "~on rows not used for fitting")
    for profile in profiles:
        made.add_row(profile.name, _errors(profile))
    show(console, made)


def _errors(profile: HardwareProfile) -> str:
    """Mean errors of whole iterations, then of groups: ``HugeCTR iterations 5.1 % (4); ...``."""
    known = [(f"{error.runtime} iterations", error) for error in profile.known_error]
    for name, group in profile.groups.items():
        if group.provenance.error is not None:
            known.append((name, group.provenance.error))
    parts = [f"{name} {percent(error.mean)} ({error.n})" for name, error in known]
    return "; ".join(parts) or _NOT_VALIDATED


def error_words(error: KnownError) -> str:
    """Mean and geometric mean of a known error, and on which rows."""
    rows = plural(error.n, "row")
    return (
        f"mean error {percent(error.mean)} (geometric mean {percent(error.geomean)}) on {rows} "
        f"of {error.suite}: {error.rows}"
    )


def iteration_words(profile: HardwareProfile) -> list[str]:
    """What is known of whole iterations, TorchRec's first, each with the software that ran them."""
    known = [(error.runtime or error.suite, error_words(error)) for error in profile.known_error]
    if all(runtime != TORCHREC for runtime, _ in known):
        known.insert(0, (TORCHREC, _NOT_VALIDATED))
    known.sort(key=lambda pair: pair[0] != TORCHREC)
    return [f"under {_named(runtime)}: {text}" for runtime, text in known]


def _named(runtime: str) -> str:
    return runtime if runtime == TORCHREC else f"{runtime} (not TorchRec)"


def show_profile(console: Console, profile: HardwareProfile) -> None:
    """Every constant, with its unit in its name, group by group, and where it comes from."""
    console.print()
    console.print(Text.assemble((profile.name, "bold"), f"  {profile.title}"))
    line(
        console,
        f"{profile.hbm_gib:g} GiB HBM and {profile.ddr_gib:g} GiB host memory per rank, "
        f"{plural(profile.gpus_per_host, 'GPU')} per host, NVLink domain of "
        f"{profile.nvlink_domain}, {plural(profile.sms, 'SM')} per GPU",
    )
    for text in iteration_words(profile):
        line(console, f"Whole iterations {text}")
    mixed = len(set(profile.origins.values())) > 1
    for name, group in profile.groups.items():
        _show_group(console, name, group, f"from {profile.origins[name]}; " if mixed else "")


def _show_group(console: Console, name: str, group: Group, place: str) -> None:
    origin = group.provenance
    within = f"times are right within about {percent(group.rel_error)} (1 sigma)"
    heading(console, name, f"{place}{KIND_WORDS[origin.kind]}; {within}")
    details = [origin.source.strip()]
    if origin.versions:
        details.append(f"versions: {origin.versions}")
    if origin.date:
        details.append(f"date: {origin.date}")
    if origin.n is not None:
        details.append(f"rows: {origin.n}")
    details += [f"{what} from {low:g} to {high:g}" for what, (low, high) in origin.range.items()]
    show(console, Text("; ".join(" ".join(d.split()) for d in details), style="italic"))
    known = _NOT_VALIDATED if origin.error is None else error_words(origin.error)
    show(console, Text(f"Known error: {known}"))
    made = table("<constant", "~value")
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
