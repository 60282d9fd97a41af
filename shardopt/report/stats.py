"""The report of ``shardopt stats``: features of a data sample, and the lines for model.yaml."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from shardopt.report.console import heading, line, show, table
from shardopt.stats.result import (
    HOT_SHARE,
    Drift,
    FeatureStats,
    IdStatistics,
    relative_change,
    yaml_line,
)

POOR_FIT = 0.05
"""Error of the distinct rows above which a Zipf distribution cannot replace the file."""
HOT_SHOWN = 3


@dataclass(frozen=True)
class Hints:
    """What the user can do about figures that are not exact.

    Args:
        rows: how to give the rows of the tables.
        distinct: how to count more distinct ids.
    """

    rows: str
    distinct: str


def show_stats(
    console: Console, found: Sequence[FeatureStats], file: Path | None, hints: Hints
) -> None:
    """A table of features, the hottest rows, and the lines for model.yaml."""
    heading(console, "Features", f"{found[0].samples:,} samples")
    columns = ("~feature", ">rows", ">ids/sample", ">empty", ">distinct ids")
    made = table(*columns, ">Zipf alpha", ">Zipf q", ">error", ">KS", ">hottest")
    for feature in found:
        made.add_row(*_cells(feature))
    show(console, made)
    _explain(console, found, hints)
    if file is not None:
        heading(console, "For model.yaml")
        for feature in found:
            if feature.seen is not None:
                # broken over lines it could not be pasted
                console.print(Text(f"  - {yaml_line(feature, file)}"), soft_wrap=True)


def show_short(console: Console, found: Sequence[FeatureStats]) -> None:
    """One line per feature."""
    for feature in found:
        fit = feature.seen.fit if feature.seen else None
        alpha = "-" if fit is None else f"{fit.alpha:.3f}"
        line(
            console,
            f"{feature.name}: {feature.pooling_factor:.4g} ids per sample, "
            f"{_distinct(feature)} distinct, alpha {alpha}",
        )


@dataclass(frozen=True)
class WindowStats:
    """One window of time: its name, start in Unix seconds, features, and the file of them."""

    name: str
    start: int
    features: Sequence[FeatureStats]
    file: Path | None


def show_windows(
    console: Console, found: Sequence[WindowStats], drift: Sequence[Drift], *, short: bool
) -> None:
    """How the features move from window to window.

    Args:
        short: a line a feature.
    """
    if short:
        for of in drift:
            line(
                console,
                f"{of.feature}: a window moves ids per sample "
                f"{relative_change(of.pooling_factors):.1%}, distinct rows "
                f"{relative_change(of.distinct_rows):.1%}, hot rows {of.hot_lost:.1%}",
            )
        return
    heading(console, "Windows", f"{len(found)}, from {found[0].name} to {found[-1].name}")
    columns = ("~feature", ">windows", ">ids/sample", ">change", ">distinct", ">change")
    made = table(*columns, ">hot rows lost")
    for of in drift:
        made.add_row(
            of.feature,
            str(of.windows),
            _range(of.pooling_factors),
            f"{relative_change(of.pooling_factors):.1%}",
            _range(of.distinct_rows),
            f"{relative_change(of.distinct_rows):.1%}",
            f"{of.hot_lost:.1%}",
        )
    show(console, made)
    line(
        console,
        "Changes are means from one window to the next. Distinct rows are those among as many ids "
        f"as the smallest window has. Hot rows are the hottest {HOT_SHARE:.0%} of a window's; lost "
        "is the share of their ids that the next window takes to other rows.",
    )


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:,.4g}" if low == high else f"{low:,.4g} - {high:,.4g}"


def windows_object(found: Sequence[WindowStats], drift: Sequence[Drift]) -> dict[str, Any]:
    """``--json`` with ``--window``.

    ``windows``: ``name``, ``start`` (Unix seconds), ``file`` (null where none was written) and
    ``features`` as in `stats_object`. ``drift`` of each feature: ``pooling_factors`` and
    ``distinct_rows`` by window, ``hot_kept`` by window but the first.
    """
    return {
        "schema": "shardopt.stats/1",
        "windows": [
            {
                "name": window.name,
                "start": window.start,
                "file": None if window.file is None else str(window.file),
                "features": [_object(feature) for feature in window.features],
            }
            for window in found
        ],
        "drift": [asdict(of) for of in drift],
    }


def stats_object(found: Sequence[FeatureStats]) -> dict[str, Any]:
    """``--json``.

    Keys of a feature: ``name``, ``rows`` (and ``rows_given``), ``samples``, ``ids``,
    ``pooling_factor``, ``empty_share``, ``pooling_factor_std``, and unless there are no ids
    ``exact`` (all distinct ids
    were counted), ``distinct``, ``curve`` (``draws`` and ``distinct`` rows in them),
    ``curve_error`` (of the bins that the file holds), ``zipf`` (``alpha``, ``q``,
    ``distinct_error``, ``ks``; null for few ids), ``reuse_histogram`` as model.yaml takes it,
    ``hottest`` (``id``, ``share``, ``uncertain``).
    """
    return {"schema": "shardopt.stats/1", "features": [_object(feature) for feature in found]}


def _object(feature: FeatureStats) -> dict[str, Any]:
    names = (
        *("name", "rows", "rows_given", "samples", "ids"),
        *("pooling_factor", "empty_share", "pooling_factor_std"),
    )
    found = {name: getattr(feature, name) for name in names}
    return found if feature.seen is None else {**found, **_seen(feature.seen, feature.ids)}


def _seen(seen: IdStatistics, ids: int) -> dict[str, Any]:
    return {
        "exact": seen.exact,
        "distinct": float(seen.distinct[-1]),
        "curve": {"draws": seen.draws.tolist(), "distinct": seen.distinct.tolist()},
        "curve_error": seen.curve_error,
        "zipf": None if seen.fit is None else asdict(seen.fit),
        "reuse_histogram": {"lookups": ids, "fractions": list(seen.reuse_fractions)},
        "hottest": [asdict(row) for row in seen.hottest],
    }


def _cells(feature: FeatureStats) -> list[str]:
    seen = feature.seen
    fit = seen.fit if seen else None
    skew = ["-"] * 4
    if fit is not None:
        skew = [f"{fit.alpha:.3f}", f"{fit.q:.3g}", f"{fit.distinct_error:.1%}", f"{fit.ks:.3f}"]
    return [
        feature.name,
        f"{feature.rows:,}",
        f"{feature.pooling_factor:.4g}",
        f"{feature.empty_share:.1%}",
        _distinct(feature),
        *skew,
        f"{seen.hottest[0].share:.2%}" if seen and seen.hottest else "-",
    ]


def _distinct(feature: FeatureStats) -> str:
    if feature.seen is None:
        return "0"
    return f"{'' if feature.seen.exact else '~'}{feature.seen.distinct[-1]:,.0f}"


def _explain(console: Console, found: Sequence[FeatureStats], hints: Hints) -> None:
    seen = {feature.name: feature.seen for feature in found if feature.seen is not None}
    poor = [name for name, s in seen.items() if s.fit and s.fit.distinct_error > POOR_FIT]
    if poor:
        line(
            console,
            f"No Zipf distribution fits {', '.join(poor)} well: use the file.",
            style="yellow",
        )
    if any(of and of.fit for of in seen.values()):
        line(
            console,
            "Zipf: the k-th most frequent id has a probability proportional to (k + q)^-alpha; a "
            "larger alpha is more skewed, a larger q flattens the head. error: of the number of "
            "distinct ids that the fit gives. KS: the largest difference between its cumulative "
            "distribution and the data's (0: none).",
        )
    if any(not feature.rows_given for feature in found):
        line(console, f"Rows are the largest id plus one; {hints.rows}.")
    if any(not s.exact for s in seen.values()):
        line(console, f"~ marks estimates from a sample of the ids; {hints.distinct}.")
    for name, s in seen.items():
        if s.hottest:
            rows = ", ".join(f"{row.id} ({row.share:.2%})" for row in s.hottest[:HOT_SHOWN])
            line(console, f"  hottest rows of {name}: {rows}", style="dim")
