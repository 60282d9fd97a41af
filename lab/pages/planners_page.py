"""docs/benchmarks.md, from the committed rows of the search benchmark.

planners_page.md beside this file is the template of the page.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from lab.pages.tables import table_head
from lab.planners.ablation import CHANGES, WHOLE, AblationRow
from lab.planners.rows import (
    OURS,
    RANDOM,
    RATED,
    RATED_SAME,
    SAME,
    SHARDOPT,
    TORCHREC,
    SearchRow,
)
from lab.statistics import grouped
from shardopt.formatting import number, percent, plural

MIXED = """\
**Warning:** these rows come from different states of the code (see Sources), so they cannot be
compared with each other. The command runs those again that are not of the present code.
"""
UNKNOWN = """\
**Warning:** these rows do not say which state of the code they come from. The present code may give
others; the command runs them again.
"""
MANY_TABLES = 100
"""Number of tables from which time to a plan as good as TorchRec's is reported."""
MUCH = 0.01
"""Relative gain from which a plan counts as better than TorchRec's, not just as good."""

WORTH, SMALL = 0.003, 5e-5
"""Share from which a stage's loss on an instance counts, and below which it is not shown."""

Value = Callable[[SearchRow], float | None]
time_ms: Value = attrgetter("time_ms")
rated_ms: Value = attrgetter("rated_ms")
Fields = Mapping[str, Mapping[str, SearchRow]]
"""Instance -> its rows by planner."""


def rows_by_instance(rows: Iterable[SearchRow]) -> Fields:
    """Group the rows by instance and planner, in their order."""
    groups = grouped(rows, lambda row: row.instance)
    return {
        name: {row.planner: row for row in instance_rows} for name, instance_rows in groups.items()
    }


class HeadToHead(NamedTuple):
    """Ours against one other planner, over all instances that both have run.

    Args:
        gains: ``1 - ours / theirs`` of instances on which both have a plan that fits.
        worse: instances on which ours is worse, or the only one without a plan.
        only_ours: number of instances on which only ours has a plan that fits.
    """

    instances: int
    gains: list[float]
    worse: list[str]
    only_ours: int

    @property
    def median_gain(self) -> float | None:
        """Median gain; None without gains."""
        return statistics.median(self.gains) if self.gains else None


def against(fields: Fields, planner: str, ours: Sequence[str], value: Value) -> HeadToHead:
    """Compare ours with one planner by one objective.

    Args:
        ours: planners whose best plan counts; instances that the first did not run are left out.
    """
    both = {
        name: planner_rows
        for name, planner_rows in fields.items()
        if planner in planner_rows and ours[0] in planner_rows
    }
    gains: list[float] = []
    worse: list[str] = []
    only_ours = 0
    for name, rows in both.items():
        values = (value(rows[name_of_ours]) for name_of_ours in ours if name_of_ours in rows)
        mine, theirs = min(filter(None, values), default=None), value(rows[planner])
        if mine is None or theirs is None:
            only_ours += mine is not None
            worse += [name] if theirs is not None else []
            continue
        gain = 1 - mine / theirs
        gains.append(0.0 if abs(gain) <= SAME else gain)
        if gains[-1] < 0:
            worse.append(name)
    return HeadToHead(len(both), gains, worse, only_ours)


class TimeToMatch(NamedTuple):
    """Time of our search to a plan at least as good as TorchRec's default.

    Args:
        as_good_s: seconds to such a plan; None if it never had one.
        better_s: seconds to one that is better by `MUCH`: the first as good is often TorchRec's
            own plan, the search's warm start.
        theirs_s: TorchRec's seconds.
        cut: TorchRec's planner ended at its limit.
    """

    instance: str
    as_good_s: float | None
    better_s: float | None
    theirs_s: float
    cut: bool


def speed(fields: Fields, least_tables: int = MANY_TABLES) -> list[TimeToMatch]:
    """Return the time to a predicted tie with TorchRec's default, for each instance."""
    matches: list[TimeToMatch] = []
    for name, rows in fields.items():
        theirs, mine = rows.get(TORCHREC), rows.get(SHARDOPT)
        if theirs is None or mine is None or theirs.tables < least_tables:
            continue
        if (ms := theirs.iteration_ms) is not None:
            reached = mine.seconds_to(ms), mine.seconds_to(ms * (1 - MUCH))
            matches.append(TimeToMatch(name, *reached, theirs.seconds, theirs.ended != "done"))
    return matches


def without_plan(fields: Fields, planner: str, value: Value) -> list[str]:
    """Return the instances on which a planner has no plan that fits."""
    return [
        name
        for name, planner_rows in fields.items()
        if planner in planner_rows and value(planner_rows[planner]) is None
    ]


def gaps(fields: Fields, planner: str, value: Value) -> list[float]:
    """Return value / bound - 1 of every instance with both."""
    rows = [planner_rows[planner] for planner_rows in fields.values() if planner in planner_rows]
    return [mine / row.bound_ms - 1 for row in rows if (mine := value(row)) and row.bound_ms]


def _planners(fields: Fields) -> list[str]:
    """Return every planner that has a row."""
    return list(dict.fromkeys(name for rows in fields.values() for name in rows))


def benchmarks_text(
    rows: Sequence[SearchRow], ablated: Sequence[AblationRow] = (), gains: Sequence[str] = ()
) -> str:
    """Return the page.

    Args:
        ablated: rows of the ablation; without any, it has no chapter.
        gains: lines of the chapter on measured gains.
    """
    fields = rows_by_instance(rows)
    parts = {
        "gains": "\n".join(gains),
        "states": "".join(f"{warning}\n" for warning in _states(rows)),
        "summary": "\n".join(summary(fields)),
        "ablation": "\n".join(_ablation(ablated)),
        "instances": "\n".join(_by_instance(fields)),
        "machines": "\n".join(_machines(rows)),
    }
    template = Path(__file__).with_suffix(".md").read_text(encoding="utf-8")
    return template.format(**parts).rstrip("\n") + "\n"


def _states(rows: Sequence[SearchRow]) -> Iterator[str]:
    """Yield a warning where the rows are not of one state of the code.

    TorchRec's planners use less of the code, so their rows have another digest than ours.
    """
    theirs = {row.sources for row in rows if row.planner.startswith(TORCHREC)}
    ours = {row.sources for row in rows if not row.planner.startswith(TORCHREC)}
    if len(theirs) > 1 or len(ours) > 1:
        yield MIXED
    elif "" in theirs | ours:
        yield UNKNOWN


def summary(fields: Fields) -> Iterator[str]:
    """Yield lines on how much better each planner is, and how soon."""
    yield f"## In short: {len(fields)} instances\n"
    yield "### (a) by shardopt's prediction\n"
    yield from _against(fields, (SHARDOPT,), time_ms)
    yield from _gap_words(fields, SHARDOPT, time_ms)
    yield "### (b) by TorchRec's rating\n"
    yield from _against(fields, (RATED, RATED_SAME), rated_ms)
    same = against(fields, TORCHREC, (RATED_SAME,), rated_ms).median_gain
    if same is not None:
        yield (
            "Among the options that TorchRec lists, the median gain over its default is "
            f"{percent(same)}.\n"
        )
    yield from _gap_words(fields, RATED, rated_ms)
    yield "### Search and model apart\n"
    yield _apart(fields)
    yield "### Time to a plan at least as good as TorchRec's\n"
    yield from _speed_words(fields)
    yield "### Plans that fit\n"
    yield from table_head("planner", "instances", "no plan that fits (a)", "no plan that fits (b)")
    for name in _planners(fields):
        ran = sum(name in field for field in fields.values())
        a, b = (len(without_plan(fields, name, value)) for value in (time_ms, rated_ms))
        yield f"| {name} | {ran} | {a} | {b} |"
    yield ""


def _against(fields: Fields, ours: Sequence[str], value: Value) -> Iterator[str]:
    """Yield a line for every planner that is not ours, random plans last."""
    rivals = [name for name in _planners(fields) if name not in OURS]
    worse: set[str] = set()
    yield from table_head(
        *("against", "instances", "better", "equal", "worse", "median gain", "least", "most"),
        "only us",
    )
    for name in sorted(rivals, key=lambda name: name == RANDOM):
        result = against(fields, name, ours, value)
        worse |= {*result.worse}
        shown = (
            result.median_gain,
            min(result.gains, default=None),
            max(result.gains, default=None),
        )
        better = sum(gain > 0 for gain in result.gains)
        gains = " | ".join("-" if gain is None else percent(gain) for gain in shown)
        yield (
            f"| {name} | {result.instances} | {better} | {result.gains.count(0.0)} "
            f"| {len(result.worse)} | {gains} | {result.only_ours} |"
        )
    yield ""
    if worse:
        yield f"Worse than some planner on {len(worse)}: {', '.join(sorted(worse))}.\n"
    else:
        yield "Never worse than any of them.\n"


def _apart(fields: Fields) -> str:
    """Describe the predicted gain of better search on TorchRec's rating."""
    by_rating = against(fields, TORCHREC, (RATED_SAME,), time_ms)
    by_time = against(fields, TORCHREC, (SHARDOPT,), time_ms)
    if by_rating.median_gain is None or by_time.median_gain is None:
        return "Not enough rows.\n"
    return (
        "Both figures here are gains in predicted iteration time over TorchRec's plan, in the "
        "median. Plans found on TorchRec's rating, among TorchRec's options: "
        f"{percent(by_rating.median_gain)} ({len(by_rating.gains)} instances). That is what better "
        "search alone brings. Plans that shardopt finds on its prediction: "
        f"{percent(by_time.median_gain)} ({len(by_time.gains)} instances). The difference is due "
        "to the cost model. A negative gain means that a plan which TorchRec rates better is "
        "predicted to be slower.\n"
    )


def _gap_words(fields: Fields, planner: str, value: Value) -> Iterator[str]:
    instance_gaps = gaps(fields, planner, value)
    if instance_gaps:
        yield (
            f"`{planner}` lies {percent(statistics.median(instance_gaps))} above its proven lower "
            f"bound in the median, at most {percent(max(instance_gaps))}.\n"
        )


def _speed_words(fields: Fields) -> Iterator[str]:
    matches = speed(fields)
    as_good = [match.as_good_s / match.theirs_s for match in matches if match.as_good_s is not None]
    better = [match.better_s / match.theirs_s for match in matches if match.better_s is not None]
    if not as_good:
        yield f"No instance of {MANY_TABLES} tables or more has been run by both.\n"
        return
    yield (
        f"On instances of {MANY_TABLES} tables or more, shardopt has a plan predicted to be "
        f"at least as fast as TorchRec's after {_middle_and_most(as_good)}. This includes the "
        "start of the search, and excludes imports for both. Often it is TorchRec's plan itself: "
        "our search starts with a reimplementation of TorchRec's "
        "(search/baselines/torchrec_planner.py). A plan that is faster by "
        f"{percent(MUCH)} or more is found after {_middle_and_most(better)}.\n"
    )
    columns = ("instance", "torchrec s", "as good after s", "share", "better after s", "share")
    yield from table_head(*columns)
    for match in matches:
        cells = [
            cell
            for at in (match.as_good_s, match.better_s)
            for cell in (("-", "-") if at is None else (f"{at:.2f}", percent(at / match.theirs_s)))
        ]
        mark = " (cut)" if match.cut else ""
        yield f"| {match.instance} | {match.theirs_s:.1f}{mark} | {' | '.join(cells)} |"
    yield ""


def _middle_and_most(shares: Sequence[float]) -> str:
    if not shares:
        return "no time, since there is none"
    middle, most = percent(statistics.median(shares)), percent(max(shares))
    return f"{middle} of TorchRec's time in the median, {most} at worst"


def _by_instance(fields: Fields) -> Iterator[str]:
    names = sorted(_planners(fields), key=lambda n: (n not in OURS, n == RANDOM))
    for title, value, ours in (
        ("(a) predicted iteration time in ms", time_ms, (SHARDOPT,)),
        ("(b) TorchRec's rating in ms", rated_ms, (RATED_SAME, RATED)),
    ):
        columns = [n for n in names if n in ours or n not in OURS]
        yield f"## Every instance: {title}\n"
        yield "A dash means that no plan fits, an empty cell that the planner was not run.\n"
        yield from table_head("instance", "bound", *columns)
        for name, field in fields.items():
            bound = field[ours[-1]].bound_ms if ours[-1] in field else None
            cells = [
                "" if row is None else "-" if (ms := value(row)) is None else number(ms)
                for row in map(field.get, columns)
            ]
            shown = "" if bound is None else number(bound)
            yield f"| {name} | {shown} | {' | '.join(cells)} |"
        yield ""
    yield "## Every instance: who found shardopt's plan, and seconds of each stage\n"
    yield from table_head("instance", "gap", "found by", "seconds", "stages")
    for name, field in fields.items():
        if (row := field.get(SHARDOPT)) is not None and (ms := row.time_ms) and row.bound_ms:
            stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in row.stages)
            gap = percent(ms / row.bound_ms - 1)
            yield f"| {name} | {gap} | {row.found_by} | {row.seconds:.1f} | {stages} |"
    yield ""
    yield "## Every instance: seconds\n"
    yield from table_head("instance", *names)
    for name, field in fields.items():
        yield f"| {name} | {' | '.join(_seconds(field.get(n)) for n in names)} |"
    yield "\n(cut): ended at its limit; (killed): without an answer.\n"


def _ablation(rows: Sequence[AblationRow]) -> Iterator[str]:
    """Yield the loss without each stage."""
    names = [name for name in CHANGES if name != WHOLE]
    groups = grouped(rows, lambda row: row.instance)
    by_instance = {name: {row.without: row for row in mine} for name, mine in groups.items()}
    by_instance = {
        name: stages for name, stages in by_instance.items() if CHANGES.keys() <= stages.keys()
    }
    if not by_instance:
        return
    yield "## What each stage brings\n"
    yield (
        f"From `python -m lab ablate` on {len(by_instance)} instances; those of "
        "configs/bench/search/fresh.yaml are new to the search. The table shows how much slower "
        "the best plan is without a stage, or by how much the bound is lower. CP-SAT and Optuna "
        "are not among the default stages, so their rows show what they add. Plans are compared by "
        "predicted time alone.\n"
    )
    yield from table_head("without", "median", "mean", "most", "on", "slower by 0.3 %")
    for name in names:
        yield f"| {_lost(name, {i: _slower(stages, name) for i, stages in by_instance.items()})} |"
    yield ""
    yield from table_head("instance", "ms", "found by", "gap", *names)
    for instance, stages in by_instance.items():
        ms, bound_ms = _times(stages[WHOLE])
        lost = [_slower(stages, name) for name in names]
        cells = [
            "no plan" if value is None else f"{100 * value:.2f}" if abs(value) > SMALL else ""
            for value in lost
        ]
        yield (
            f"| {instance} | {number(ms)} | {stages[WHOLE].found_by} "
            f"| {percent(ms / bound_ms - 1)} | {' | '.join(cells)} |"
        )
    yield "\nLosses in the last table are in per cent; below 0.005 % the cell is empty.\n"


def _times(row: AblationRow) -> tuple[float, float]:
    """Return the time and bound of the whole search in ms."""
    assert row.iteration_ms
    assert row.bound_ms
    return row.iteration_ms, row.bound_ms


def _slower(stages: Mapping[str, AblationRow], name: str) -> float | None:
    """Return the relative slowdown without a stage, or the relative loss of the bound without one
    of its own; None where no plan was found."""
    without, (ms, bound_ms) = stages[name], _times(stages[WHOLE])
    if without.iteration_ms is None or without.bound_ms is None:
        return None
    return (
        bound_ms / without.bound_ms - 1 if CHANGES[name].proves else without.iteration_ms / ms - 1
    )


def _lost(name: str, lost: Mapping[str, float | None]) -> str:
    """Return the cells of a stage: median, mean and largest loss, its instance, and the number of
    instances that lose much or have no plan."""
    with_plan = {instance: value for instance, value in lost.items() if value is not None}
    values = list(with_plan.values())
    worst = max(with_plan, key=with_plan.__getitem__)
    shown = (statistics.median(values), statistics.fmean(values), with_plan[worst])
    much = sum(value is None or value > WORTH for value in lost.values())
    return " | ".join([name, *(f"{100 * value:.2f} %" for value in shown), worst, str(much)])


def _seconds(row: SearchRow | None) -> str:
    if row is None:
        return ""
    mark = {"limit": " (cut)", "killed": " (killed)"}.get(row.ended, "")
    return f"{row.seconds:.2f}{mark if row.planner != RANDOM else ''}"


def _machines(rows: Sequence[SearchRow]) -> Iterator[str]:
    yield "## Machine\n"
    for machine, machine_rows in grouped(rows, lambda row: row.machine).items():
        loads = [row.load for row in machine_rows]
        yield f"- {machine}; load average {min(loads):.1f} to {max(loads):.1f}"
    yield "\n## Sources\n"
    yield (
        "A row keeps a digest of the code that it comes from (predictor and search; for TorchRec's "
        "planners predictor and rating). The command runs a row again when its digest is another; "
        "until then its figures are of the code that it came from, not of a later one.\n"
    )
    for sources, count in Counter(row.sources or "not kept" for row in rows).items():
        yield f"- {sources}: {plural(count, 'row')}"
