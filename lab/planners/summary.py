"""What the rows of the search benchmark say, as numbers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

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

Value = Callable[[SearchRow], float | None]
InstanceRows = Mapping[str, SearchRow]
"""Rows of one instance by planner."""

MANY_TABLES = 100
"""Tables from which the time to a plan as good as TorchRec's has a target."""
MUCH = 0.01
"""Relative gain from which a plan counts as better than TorchRec's, not as good."""


@dataclass(frozen=True)
class HeadToHead:
    """Ours against one other planner, over all instances that both have run.

    Args:
        instances: that both have run; ``answered``: on which both have a plan that fits.
        worse: instances on which ours is worse, or has no plan where the other has.
        median_gain: median of 1 - ours / theirs; None without an instance.
        only_ours: instances on which the other has no plan that fits, and ours has.
    """

    planner: str
    instances: int
    answered: int
    better: int
    equal: int
    worse: tuple[str, ...]
    median_gain: float | None
    least_gain: float | None
    most_gain: float | None
    only_ours: int


@dataclass(frozen=True)
class TimeToMatch:
    """When our search first had a plan at least as good as TorchRec's default.

    Args:
        as_good_s: seconds to such a plan; None if it never had one.
        better_s: seconds to one that is better by `MUCH`; the first as good is often TorchRec's own
            plan, which starts the search.
        theirs_s: TorchRec's seconds; ``cut``: it had to end at its limit.
    """

    instance: str
    as_good_s: float | None
    better_s: float | None
    theirs_s: float
    cut: bool


def rows_by_instance(rows: Iterable[SearchRow]) -> dict[str, InstanceRows]:
    """Instance -> its rows by planner, in the order of the rows."""
    found: dict[str, dict[str, SearchRow]] = {}
    for row in rows:
        found.setdefault(row.instance, {})[row.planner] = row
    return dict(found)


def time_ms(row: SearchRow) -> float | None:
    """Objective (a): predicted time of a plan that fits."""
    return row.time_ms


def rated_ms(row: SearchRow) -> float | None:
    """Objective (b): TorchRec's rating of a plan that fits by its count."""
    return row.rated_ms


def ours_predicted(rows: InstanceRows) -> float | None:
    """Our search's predicted time."""
    return rows[SHARDOPT].time_ms if SHARDOPT in rows else None


def ours_rated(rows: InstanceRows) -> float | None:
    """The better rating of our two searches on TorchRec's cost."""
    values = (rows[name].rated_ms for name in (RATED, RATED_SAME) if name in rows)
    return min((v for v in values if v is not None), default=None)


def ours_rated_same(rows: InstanceRows) -> float | None:
    """The rating of our search on TorchRec's cost among TorchRec's own options."""
    return rows[RATED_SAME].rated_ms if RATED_SAME in rows else None


def others(rows: Iterable[SearchRow]) -> list[str]:
    """Planners that are not ours, in the order of the rows; random last."""
    names = dict.fromkeys(r.planner for r in rows if r.planner not in OURS)
    return sorted(names, key=lambda name: name == RANDOM)


def against(
    instances: Mapping[str, InstanceRows],
    planner: str,
    ours: Callable[[InstanceRows], float | None],
    value: Value,
    needs: str,
) -> HeadToHead:
    """Ours against one planner by one objective.

    Args:
        needs: planner of ours that must have run on an instance for it to count.
    """
    both = {name: f for name, f in instances.items() if planner in f and needs in f}
    gains: list[float] = []
    worse: list[str] = []
    only = 0
    for name, rows in both.items():
        mine, theirs = ours(rows), value(rows[planner])
        if mine is None or theirs is None:
            only += mine is not None
            worse += [name] if theirs is not None else []
            continue
        gain = 1 - mine / theirs
        gains.append(0.0 if abs(gain) <= SAME else gain)
        if gains[-1] < 0:
            worse.append(name)
    return HeadToHead(
        planner,
        len(both),
        len(gains),
        sum(gain > 0 for gain in gains),
        gains.count(0.0),
        tuple(worse),
        statistics.median(gains) if gains else None,
        min(gains, default=None),
        max(gains, default=None),
        only,
    )


def speed(
    instances: Mapping[str, InstanceRows], least_tables: int = MANY_TABLES
) -> list[TimeToMatch]:
    """Time to a plan as good as TorchRec's default by the predictor, an instance each."""
    found: list[TimeToMatch] = []
    for name, rows in instances.items():
        theirs, mine = rows.get(TORCHREC), rows.get(SHARDOPT)
        if theirs is None or mine is None or theirs.tables < least_tables:
            continue
        if theirs.iteration_ms is not None:
            as_good = _reached(mine, theirs.iteration_ms)
            better = _reached(mine, theirs.iteration_ms * (1 - MUCH))
            cut = theirs.ended != "done"
            found.append(TimeToMatch(name, as_good, better, theirs.seconds, cut))
    return found


def _reached(row: SearchRow, ms: float) -> float | None:
    """When a search had a plan this fast; at its end, if it did not tell earlier."""
    at = row.seconds_to(ms)
    if at is None and row.time_ms is not None and row.time_ms <= ms * (1 + SAME):
        return row.seconds
    return at


def shares(found: Iterable[TimeToMatch], *, better: bool = False) -> list[float]:
    """Our seconds over TorchRec's, where ours has reached it."""
    mine = ((one.better_s if better else one.as_good_s, one.theirs_s) for one in found)
    return [at / theirs for at, theirs in mine if at is not None]


def without_plan(instances: Mapping[str, InstanceRows], planner: str, value: Value) -> list[str]:
    """Instances on which a planner has no plan that fits."""
    return [name for name, f in instances.items() if planner in f and value(f[planner]) is None]


def gaps(instances: Mapping[str, InstanceRows], planner: str, value: Value) -> list[float]:
    """Value over its bound, less 1, of every instance with both."""
    found = []
    for rows in instances.values():
        row = rows.get(planner)
        mine = value(row) if row is not None else None
        if row is not None and mine is not None and row.bound_ms:
            found.append(mine / row.bound_ms - 1)
    return found


def by_memory(instances: Mapping[str, InstanceRows]) -> dict[str, dict[str, InstanceRows]]:
    """The instances, loose, tight and packed apart."""
    found: dict[str, dict[str, InstanceRows]] = {}
    for name, rows in instances.items():
        found.setdefault(next(iter(rows.values())).memory, {})[name] = rows
    return found


def planners_of(instances: Mapping[str, InstanceRows]) -> Sequence[str]:
    """Every planner that has a row."""
    return list(dict.fromkeys(name for rows in instances.values() for name in rows))
