"""Gains of our plans over those of TorchRec's planner: every measured set, good or bad.

Three sources, all committed rows: the suite against-torchrec (docs/accuracy), the tasks of
``python -m lab confirm`` (configs/bench/confirmed), and times from a clock outside this project
(configs/bench/outside).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.pages.tables import percent, read_csv, scores_file, table_head
from lab.statistics import mean_interval
from lab.suites import COMMITTED

CONFIRMED = COMMITTED / "confirmed"
"""Rows of `python -m lab confirm`."""
OUTSIDE = COMMITTED / "outside" / "gains.csv"
SUITE, GAIN, EXPECTED = "against-torchrec", "against TorchRec's planner", "expected gains"
CALIBRATED = "shardopt, machine calibrated"
SHIPPED = "shardopt, shipped profile, where it gives another plan"
FORETOLD = "shardopt, shipped profile, as it foretells"
SETTINGS = (
    ("shipped profile, of another machine", SHIPPED, FORETOLD),
    ("machine calibrated", CALIBRATED, CALIBRATED),
)
"""Setting of the user, and the suite's names of its measured and expected gains, in the order of
the page."""


@dataclass(frozen=True)
class GainRow:
    """One measured set of models; gains are fractions of the time of TorchRec's plan.

    Args:
        setting: preparation before the plans were chosen.
        mean: mean gain, with its 95 % interval; None where that is not known.
        expected: mean gain that `plan` printed; None where it is not recorded.
        words: remarks.
    """

    setting: str
    models: int
    mean: float
    interval: tuple[float, float] | None
    expected: float | None
    words: str


def gain_rows(folder: Path, models: Sequence[str] = ("all",)) -> Iterator[GainRow]:
    """Yield every set, from the shipped profile to confirmed plans; independent timings come last.

    Args:
        folder: docs/accuracy.
        models: families of models that have a row of their own.
    """
    yield from _against(folder, models)
    yield from _confirmed()
    yield from _outside()


def _against(folder: Path, models: Sequence[str]) -> Iterator[GainRow]:
    def of(plans: str, name: str) -> dict[str, Mapping[str, str]]:
        return {
            row["models"]: row
            for row in read_csv(folder / scores_file(SUITE, name))
            if (row["plans of"], row["runtime"], row["task set"]) == (plans, "plain", "all")
        }

    for setting, plans, priced in SETTINGS:
        measured, expected = of(plans, GAIN), of(priced, EXPECTED)
        for family in (name for name in models if name in measured):
            row = measured[family]
            faster, equal, slower = (int(row[verdict]) for verdict in ("faster", "equal", "slower"))
            kind = "" if family == "all" else f", {family} models"
            yield GainRow(
                f"{setting}{kind}",
                int(row["tasks"]),
                float(row["mean gain"]),
                (float(row["from"]), float(row["to"])),
                float(expected[family]["mean expected"]),
                f"{_verdicts(faster, equal, slower)}; {percent(row['least'], '+')} at worst",
            )


def _verdicts(faster: int, equal: int, slower: int) -> str:
    return f"{faster} faster, {equal} equal, {slower} slower"


def _confirmed() -> Iterator[GainRow]:
    """Yield the gains of plans learned from one trace, and of confirmed plans."""
    tasks = [json.loads(path.read_text()) for path in sorted(CONFIRMED.glob("task_*.json"))]
    tasks = [task for task in tasks if "left_out" not in task]
    kinds = (
        ("learned", "learned from one trace", lambda t: t["expected"]["value"]),
        ("confirmed", "learned, then `--confirm`", lambda t: t["confirmed_gain"][0]),
    )
    for name, setting, expected in kinds:
        gains = [task["gain"][name] for task in tasks]
        mean, low, high = mean_interval([gain["value"] for gain in gains])
        faster = sum((gain["low"] or 0) > 0 for gain in gains)
        slower = sum((gain["high"] or 0) < 0 for gain in gains)
        worst = percent(min(gain["value"] for gain in gains), "+")
        verdicts = _verdicts(faster, len(gains) - faster - slower, slower)
        yield GainRow(
            setting,
            len(gains),
            mean,
            (low, high),
            statistics.fmean(map(expected, tasks)),
            f"{verdicts}; {worst} at worst",
        )


def _outside() -> Iterator[GainRow]:
    for row in read_csv(OUTSIDE):
        gains = [float(gain) for gain in row["gains"].split()]
        ends = (row["low"], row["high"])
        words = [" ".join(f"{100 * gain:+.1f}" for gain in gains) + " %"] if gains else []
        if row["itself"]:
            words.append(f"TorchRec's plan differs from itself by {percent(row['itself'])}")
        if row["held"]:
            words.append(f"{row['held']} of {row['models']} gains in their interval")
        yield GainRow(
            f"timed independently: {row['setting']}",
            int(row["models"]),
            statistics.fmean(gains) if gains else float(row["mean"]),
            (float(ends[0]), float(ends[1])) if all(ends) else None,
            float(row["expected"]),
            "; ".join(words),
        )


def gain_table(rows: Sequence[GainRow]) -> Iterator[str]:
    """Yield the rows as a table, with expected gains beside measured ones."""
    yield from table_head("plans chosen with", "models", "mean gain", "expected", "remarks")
    for row in rows:
        ends = row.interval and tuple(percent(end, "+") for end in row.interval)
        between = f" ({ends[0]} to {ends[1]})" if ends else ""
        expected = "-" if row.expected is None else percent(row.expected, "+")
        yield (
            f"| {row.setting} | {row.models} | {percent(row.mean, '+')}{between} | {expected} "
            f"| {row.words} |"
        )


def optimism(folder: Path) -> str:
    """Describe by how much expected gains are too high, from the rows of both profiles."""
    by_plans = {
        row["plans of"]: row
        for row in read_csv(folder / scores_file(SUITE, EXPECTED))
        if (row["runtime"], row["models"], row["task set"]) == ("plain", "all", "all")
    }
    ours, shipped = by_plans[CALIBRATED], by_plans[FORETOLD]

    def points(*columns: str) -> str:
        value, low, high = (f"{100 * float(ours[column]):.1f}" for column in columns)
        return f"{value} ({low} to {high})"

    measured, expected = float(ours["mean measured"]), float(ours["mean expected"])
    return (
        "*Expected* is the gain that `plan` prints. With the machine calibrated it is "
        f"{points('expected - measured', 'from', 'to')} percentage points too high; the ratio of "
        f"the predicted times is {points('optimism', 'optimism from', 'optimism to')} too high. "
        f"The measured gain is {100 * measured / expected:.0f} % of the expected one, and "
        f"{percent(ours['in the interval'])} of the gains lie in their 90 % interval. With the "
        f"shipped profile of another machine {percent(shipped['in the interval'])} do."
    )
