"""The report of ``shardopt stats``: features of a data sample, and the lines for model.yaml."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from shardopt.api.json_object import JsonObject, key
from shardopt.report.blocks import Block, Heading, Line, TextTable, View, warning
from shardopt.stats.result import (
    HOT_SHARE,
    Drift,
    FeatureStats,
    HotRow,
    relative_change,
    yaml_line,
)

POOR_FIT = 0.05
"""Error of the distinct rows above which a Zipf distribution cannot replace the file."""
HOT_SHOWN = 3
SCHEMA = "shardopt.stats/1"


class FeatureAnswer(JsonObject):
    """One feature; one without ids ends at ``length_correlation``."""

    name: str
    rows: int
    rows_given: bool
    samples: int
    ids: int
    pooling_factor: float
    empty_share: float
    pooling_factor_std: float
    pooling_factor_max: int
    length_correlation: float = key("Two features correlate by the product of theirs.")
    exact: bool = key("All distinct ids were counted.", default=False)
    distinct: float = key("Distinct ids.", default=0.0)
    curve: dict[str, list[float]] | None = key(
        "``distinct`` rows expected in so many ``draws``.", default=None
    )
    curve_error: float = key("Of the bins that the file holds.", default=0.0)
    zipf: Any = key("``alpha``, ``q``, ``distinct_error``, ``ks``; null for few ids.", default=None)
    reuse_histogram: dict[str, Any] | None = key("As model.yaml takes it.", default=None)
    hottest: list[HotRow] = key("``id``, ``share``, ``uncertain``.", default=())

    @model_validator(mode="before")
    @classmethod
    def _of_feature(cls, feature: Any) -> Any:
        if not isinstance(feature, FeatureStats):
            return feature
        keys = {**vars(feature), "pooling_factor": feature.pooling_factor}
        seen = feature.seen
        if seen is None:
            return keys
        return {
            **keys,
            **vars(seen),
            "distinct": float(seen.distinct[-1]),
            "curve": {"draws": seen.draws.tolist(), "distinct": seen.distinct.tolist()},
            "zipf": seen.fit and asdict(seen.fit),
            "reuse_histogram": {"lookups": feature.ids, "fractions": seen.reuse_fractions},
        }


class StatsAnswer(JsonObject):
    """``shardopt stats``."""

    schema_version: str = Field(alias="schema", description="Form of this object.")
    features: list[FeatureAnswer]


class WindowAnswer(JsonObject):
    """Statistics of a window of time."""

    name: str
    start: int = key("In Unix seconds.")
    file: Annotated[str, BeforeValidator(str)] | None = key("Null where none was written.")
    features: list[FeatureAnswer]


class WindowsAnswer(JsonObject):
    """``shardopt stats --window``."""

    schema_version: str = Field(alias="schema", description="Form of this object.")
    windows: list[WindowAnswer]
    drift: list[Drift] = key(
        "Of each feature: ``pooling_factors`` and ``distinct_rows`` by window, ``hot_kept`` by "
        "window but the first."
    )


def stats_view(features: Sequence[FeatureStats], file: Path | None, notes: Sequence[str]) -> View:
    """A table of features, the hottest rows, and the lines for model.yaml."""
    columns = ["~feature", ">rows", ">ids/sample", ">empty", ">distinct ids"]
    columns += [">Zipf alpha", ">Zipf q", ">error", ">KS", ">hottest"]
    report: list[Block] = [
        Heading("Features", f"{features[0].samples:,} samples"),
        TextTable(columns, [_cells(feature) for feature in features]),
        *_explained(features),
    ]
    if file is not None:
        report.append(Heading("For model.yaml"))
        # broken over lines they could not be pasted
        with_ids = [feature for feature in features if feature.seen is not None]
        report += [Line(f"  - {yaml_line(feature, file)}", wraps=False) for feature in with_ids]
    answer = StatsAnswer.model_validate({"schema": SCHEMA, "features": features})
    return View(answer, report, [_short(feature) for feature in features], notes)


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
    """Show how the features move from window to window."""
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
        TextTable([*columns, ">hot rows lost"], rows),
        "Changes are means from one window to the next. Distinct rows are those among as many ids "
        f"as the smallest window has. Hot rows are the hottest {HOT_SHARE:.0%} of a window's; lost "
        "is the share of their ids that fall on other rows in the next window.",
    ]
    short = [
        f"{moved.feature}: a window moves ids per sample {pooling}, distinct rows {distinct}, hot "
        f"rows {moved.hot_lost:.1%}"
        for moved, pooling, distinct in moves
    ]
    answer = WindowsAnswer.model_validate({"schema": SCHEMA, "windows": stats, "drift": drift})
    return View(answer, report, short, notes)


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:,.4g}" if low == high else f"{low:,.4g} - {high:,.4g}"


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
