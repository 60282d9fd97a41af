"""The report of ``shardopt stats``: features of a data sample, and the lines for model.yaml."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardopt.report.blocks import Block, Grid, Heading, Line, View, warning
from shardopt.stats.result import (
    HOT_SHARE,
    LENGTHS,
    Drift,
    FeatureStats,
    IdStatistics,
    relative_change,
    yaml_line,
)

POOR_FIT = 0.05
"""Error of the distinct rows above which a Zipf distribution cannot replace the file."""
HOT_SHOWN = 3
SCHEMA = "shardopt.stats/1"


def stats_view(features: Sequence[FeatureStats], file: Path | None, notes: Sequence[str]) -> View:
    """A table of features, the hottest rows, and the lines for model.yaml.

    Keys of a feature: ``name``, ``rows`` (and ``rows_given``), ``samples``, ``ids``,
    ``pooling_factor``, ``empty_share``, ``pooling_factor_std``, ``pooling_factor_max``,
    ``length_correlation`` (two features correlate by the product of theirs), and unless there are
    no ids ``exact`` (all distinct ids were counted), ``distinct``, ``curve`` (``draws`` and
    ``distinct`` rows in them), ``curve_error`` (of the bins that the file holds), ``zipf``
    (``alpha``, ``q``, ``distinct_error``, ``ks``; null for few ids), ``reuse_histogram`` as
    model.yaml takes it, ``hottest`` (``id``, ``share``, ``uncertain``).
    """
    columns = ["~feature", ">rows", ">ids/sample", ">empty", ">distinct ids"]
    columns += [">Zipf alpha", ">Zipf q", ">error", ">KS", ">hottest"]
    report: list[Block] = [
        Heading("Features", f"{features[0].samples:,} samples"),
        Grid(columns, [_cells(feature) for feature in features]),
        *_explained(features),
    ]
    if file is not None:
        report.append(Heading("For model.yaml"))
        # broken over lines they could not be pasted
        with_ids = [feature for feature in features if feature.seen is not None]
        report += [Line(f"  - {yaml_line(feature, file)}", wraps=False) for feature in with_ids]
    data = {"schema": SCHEMA, "features": [_object(feature) for feature in features]}
    return View(data, report, [_short(feature) for feature in features], notes)


def _short(feature: FeatureStats) -> str:
    fit = feature.seen.fit if feature.seen else None
    alpha = "-" if fit is None else f"{fit.alpha:.3f}"
    return (
        f"{feature.name}: {feature.pooling_factor:.4g} ids per sample, {_distinct(feature)} "
        f"distinct, alpha {alpha}"
    )


@dataclass(frozen=True)
class WindowStats:
    """One window of time: its name, start in Unix seconds, features, and the file of them."""

    name: str
    start: int
    features: Sequence[FeatureStats]
    file: Path | None


def windows_view(
    stats: Sequence[WindowStats], drift: Sequence[Drift], notes: Sequence[str]
) -> View:
    """Show how the features move from window to window.

    Keys:
        ``windows``: ``name``, ``start`` (Unix seconds), ``file`` (null where none was written) and
        ``features`` as in `stats_view`. ``drift`` of each feature: ``pooling_factors`` and
        ``distinct_rows`` by window, ``hot_kept`` by window but the first.
    """
    moves = [
        (
            moved,
            f"{relative_change(moved.pooling_factors):.1%}",
            f"{relative_change(moved.distinct_rows):.1%}",
        )
        for moved in drift
    ]
    rows = [
        (
            moved.feature,
            str(moved.windows),
            _range(moved.pooling_factors),
            pooling,
            _range(moved.distinct_rows),
            distinct,
            f"{moved.hot_lost:.1%}",
        )
        for moved, pooling, distinct in moves
    ]
    columns = ["~feature", ">windows", ">ids/sample", ">change", ">distinct", ">change"]
    report: list[Block] = [
        Heading(
            "Windows",
            f"{len(stats)}, from {stats[0].name} to {stats[-1].name}",
        ),
        Grid([*columns, ">hot rows lost"], rows),
        "Changes are means from one window to the next. Distinct rows are those among as many ids "
        f"as the smallest window has. Hot rows are the hottest {HOT_SHARE:.0%} of a window's; lost "
        "is the share of their ids that fall on other rows in the next window.",
    ]
    short = [
        f"{moved.feature}: a window moves ids per sample {pooling}, distinct rows {distinct}, hot "
        f"rows {moved.hot_lost:.1%}"
        for moved, pooling, distinct in moves
    ]
    windows = [
        {
            "name": window.name,
            "start": window.start,
            "file": None if window.file is None else str(window.file),
            "features": [_object(feature) for feature in window.features],
        }
        for window in stats
    ]
    data = {
        "schema": SCHEMA,
        "windows": windows,
        "drift": [asdict(moved) for moved in drift],
    }
    return View(data, report, short, notes)


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:,.4g}" if low == high else f"{low:,.4g} - {high:,.4g}"


def _object(feature: FeatureStats) -> dict[str, Any]:
    names = (
        *("name", "rows", "rows_given", "samples", "ids"),
        *("pooling_factor", "empty_share", *LENGTHS),
    )
    values = {name: getattr(feature, name) for name in names}
    return values if feature.seen is None else {**values, **_seen(feature.seen, feature.ids)}


def _seen(statistics: IdStatistics, ids: int) -> dict[str, Any]:
    return {
        "exact": statistics.exact,
        "distinct": float(statistics.distinct[-1]),
        "curve": {"draws": statistics.draws.tolist(), "distinct": statistics.distinct.tolist()},
        "curve_error": statistics.curve_error,
        "zipf": None if statistics.fit is None else asdict(statistics.fit),
        "reuse_histogram": {"lookups": ids, "fractions": list(statistics.reuse_fractions)},
        "hottest": [asdict(row) for row in statistics.hottest],
    }


def _cells(feature: FeatureStats) -> list[str]:
    statistics = feature.seen
    fit = statistics.fit if statistics else None
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
        f"{statistics.hottest[0].share:.2%}" if statistics and statistics.hottest else "-",
    ]


def _distinct(feature: FeatureStats) -> str:
    if feature.seen is None:
        return "0"
    return f"{'' if feature.seen.exact else '~'}{feature.seen.distinct[-1]:,.0f}"


def _explained(features: Sequence[FeatureStats]) -> list[Block]:
    by_feature = {feature.name: feature.seen for feature in features if feature.seen is not None}
    poor = [name for name, s in by_feature.items() if s.fit and s.fit.distinct_error > POOR_FIT]
    lines: list[Block] = []
    if poor:
        lines.append(warning(f"No Zipf distribution fits {', '.join(poor)} well: use the file."))
    if any(statistics.fit for statistics in by_feature.values()):
        lines.append(
            "Zipf: the k-th most frequent id has a probability proportional to (k + q)^-alpha; a "
            "larger alpha is more skewed, a larger q flattens the head. error: of the number of "
            "distinct ids that the fit gives. KS: the largest difference between its cumulative "
            "distribution and the data's (0: none)."
        )
    if any(not feature.rows_given for feature in features):
        lines.append(
            "Rows are the largest id plus one where neither table rows nor a model are given."
        )
    if any(not s.exact for s in by_feature.values()):
        lines.append("~ marks estimates: more distinct ids than are counted exactly.")
    for name, s in by_feature.items():
        if s.hottest:
            rows = ", ".join(f"{row.id} ({row.share:.2%})" for row in s.hottest[:HOT_SHOWN])
            lines.append(Line(f"  hottest rows of {name}: {rows}", "dim"))
    return lines
