"""Hardware profiles: the list, and one with its sources, ranges and known errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from predictor.hardware.loader import DEFAULT_HARDWARE
from predictor.hardware.schema import PROVENANCE_ORDER, Group, HardwareProfile, KnownError
from shardopt.formatting import KIND_WORDS, percent, plural
from shardopt.report.blocks import Block, Heading, Line, TextTable, View

TORCHREC = "TorchRec"
_NOT_CONSTANTS = ("provenance", "rel_error", "law")


def hardware_object(profile: HardwareProfile) -> dict[str, Any]:
    """Return one profile for ``--json``.

    Keys: all of its file, and ``origins``: group -> what gives it. ``known_error`` (of whole
    iterations, a list) and ``provenance.error`` (of a group) hold ``suite``, ``rows``, ``n``, and
    ``mean`` and ``geomean`` as fractions; an empty list and null say that nothing is validated.
    """
    return {**profile.model_dump(mode="json", by_alias=True), "origins": profile.origins}


def list_view(profiles: Sequence[HardwareProfile]) -> View:
    """A row per profile, with the groups of each provenance; then what is known of their errors."""
    rows = [
        (
            profile.name + " *" * (profile.name == DEFAULT_HARDWARE),
            profile.title,
            f"{profile.hbm_gib:g}",
            str(profile.gpus_per_host),
            str(profile.nvlink_domain),
            _kinds(profile),
        )
        for profile in profiles
    ]
    columns = ["<name", "~device", ">HBM GiB", ">GPUs/host", ">NVLink", "~constants"]
    errors_of = "mean absolute error and number of rows; whatever is not listed is not validated"
    data = {profile.name: hardware_object(profile) for profile in profiles}
    return View(
        {"default": DEFAULT_HARDWARE, "profiles": data},
        [
            Heading("Hardware profiles", "shipped with shardopt; a path to a profile works too"),
            TextTable(columns, rows),
            f"* the default. `shardopt hardware {DEFAULT_HARDWARE}` shows it with its sources.",
            Heading("Known errors", errors_of),
            TextTable(
                ["<name", "~on rows not used for fitting"], [(p.name, _errors(p)) for p in profiles]
            ),
        ],
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


def _errors(profile: HardwareProfile) -> str:
    """Mean errors of whole iterations, then of groups: ``HugeCTR iterations 5.1 % (4); ...``."""
    errors = [(f"{error.runtime} iterations", error) for error in profile.known_error]
    for name, group in profile.groups.items():
        if group.provenance.error is not None:
            errors.append((name, group.provenance.error))
    parts = [f"{name} {percent(error.mean)} ({error.n})" for name, error in errors]
    return "; ".join(parts) or error_words(None)


def error_words(error: KnownError | None) -> str:
    """Mean and geometric mean of a known error, and on which rows."""
    if error is None:
        return "not validated"
    rows = plural(error.n, "row")
    return (
        f"mean error {percent(error.mean)} (geometric mean {percent(error.geomean)}) on {rows} "
        f"of {error.suite}: {error.rows}"
    )


def iteration_words(profile: HardwareProfile) -> list[str]:
    """List the known errors of whole iterations, TorchRec's first, each with its runtime."""
    errors = [(error.runtime or error.suite, error_words(error)) for error in profile.known_error]
    if all(runtime != TORCHREC for runtime, _ in errors):
        errors.insert(0, (TORCHREC, error_words(None)))
    errors.sort(key=lambda pair: pair[0] != TORCHREC)
    named = (name if name == TORCHREC else f"{name} (not TorchRec)" for name, _ in errors)
    return [f"under {name}: {text}" for name, (_, text) in zip(named, errors, strict=True)]


def profile_view(profile: HardwareProfile) -> View:
    """Show every constant, with its unit in its name, group by group, and its source."""
    report: list[Block] = [
        "",
        Line(f"{profile.name}  {profile.title}", "bold"),
        _machine(profile),
        *(f"Whole iterations {text}" for text in iteration_words(profile)),
    ]
    mixed = len(set(profile.origins.values())) > 1
    for name, group in profile.groups.items():
        report += _group(name, group, f"from {profile.origins[name]}; " if mixed else "")
    return View(hardware_object(profile), report)


def _machine(profile: HardwareProfile) -> str:
    """Memory of a rank, and how ranks are put together."""
    if profile.device == "cpu":
        ranks = plural(profile.gpus_per_host, "rank")
        return f"{profile.ddr_gib:g} GiB memory per rank, {ranks} per host"
    return (
        f"{profile.hbm_gib:g} GiB HBM and {profile.ddr_gib:g} GiB host memory per rank, "
        f"{plural(profile.gpus_per_host, 'GPU')} per host, NVLink domain of "
        f"{profile.nvlink_domain}, {plural(profile.sms, 'SM')} per GPU"
    )


def _group(name: str, group: Group, place: str) -> list[Block]:
    origin = group.provenance
    within = f"times are right within about {percent(group.rel_error)} (1 sigma)"
    details = [
        origin.source,
        *([f"versions: {origin.versions}"] if origin.versions else []),
        *([f"date: {origin.date}"] if origin.date else []),
        *([f"rows: {origin.n}"] if origin.n is not None else []),
        *(f"{axis} from {low:g} to {high:g}" for axis, (low, high) in origin.range.items()),
    ]
    constants = [
        (key, _value(value))
        for key, value in group.model_dump(mode="json", exclude_none=True).items()
        if key not in _NOT_CONSTANTS
    ]
    return [
        Heading(name, f"{place}{KIND_WORDS[origin.kind]}; {within}"),
        Line("; ".join(" ".join(d.split()) for d in details), "dim"),
        f"Known error: {error_words(origin.error)}",
        TextTable(["<constant", "~value"], constants),
    ]


def _value(value: object) -> str:
    if isinstance(value, dict):
        shown = {k: v for k, v in value.items() if k != "source" and v not in (None, {})}
        return ", ".join(f"{k} {_value(v)}" for k, v in shown.items())
    if isinstance(value, list):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    return f"{value:g}" if isinstance(value, float) else str(value)
