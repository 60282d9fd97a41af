"""Rows of the search benchmark: one planner on one instance, as CSV."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from typing import Any

import predictor
import search
from predictor.csv_rows import Row as Cells
from predictor.csv_rows import count, number
from shardopt.extras import needs_torchrec
from shardopt.measure.store import RowKind

TORCHREC, SHARDOPT, RANDOM = "torchrec", "shardopt", "random"
RATED, RATED_SAME = "shardopt on torchrec's cost", "shardopt on torchrec's cost and options"
OURS = (RATED_SAME, RATED, SHARDOPT)
"""Planners that other modules name; `lab.planners.run` has them all."""
NO_PLAN, KILLED = "no plan", "killed"
"""How a planner ended that found none, and one that was ended from outside."""


@dataclass(frozen=True)
class Outcome:
    """What a planner's plans are worth.

    Args:
        seconds: from the problem to the plan; imports and the model's file are not in it.
        iteration_ms: predicted time; None without a plan.
        fits: by shardopt's count of memory.
        rating_ms: TorchRec's; of a baseline's best plan under it, which is another plan.
        rating_fits: by TorchRec's count.
        bound_ms: proven for what the planner minimises; None where it proves nothing.
        ended: ``work``, ``gap`` or ``time`` as a search ends; ``done``, ``limit``, `NO_PLAN` or
            `KILLED`.
        incumbents: (second, ms) of every better plan on the way, where the planner tells.
    """

    seconds: float
    iteration_ms: float | None = None
    fits: bool | None = None
    rating_ms: float | None = None
    rating_fits: bool | None = None
    bound_ms: float | None = None
    ended: str = NO_PLAN
    incumbents: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class SearchRow(Outcome):
    """What one planner made of one instance.

    Args:
        memory: ``loose``, ``tight`` or ``packed``.
        machine: processor, cores, versions.
        load: load average before.
        sources: digest of the code that it comes from; empty where none was kept.
    """

    instance: str
    tables: int
    gpus: int
    memory: str
    planner: str
    machine: str
    load: float
    sources: str = ""

    @property
    def time_ms(self) -> float | None:
        """Predicted time of a plan that fits; None where there is none."""
        return self.iteration_ms if self.fits else None

    @property
    def rated_ms(self) -> float | None:
        """Rating of a plan that fits by TorchRec's count; None where there is none."""
        return self.rating_ms if self.rating_fits else None

    def seconds_to(self, ms: float) -> float | None:
        """When it first had a plan at least this fast; None if it never had, or does not tell."""
        reached = (at for at, best in self.incumbents if best <= ms * (1 + SAME))
        return next(reached, None)


SAME = 1e-9
"""Relative difference of times that differ by rounding alone."""
_OUTCOME = tuple(field.name for field in fields(Outcome))
COLUMNS = (
    "instance",
    "tables",
    "gpus",
    "memory",
    "planner",
    *_OUTCOME,
    "machine",
    "load",
    "sources",
)
_COMMENT = "# rows of `python -m lab search`; see docs/benchmarks.md\n"


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return " ".join(f"{at:.4f}:{ms!r}" for at, ms in value)
    return repr(value) if isinstance(value, float) else str(value)


def _yes(cells: Cells, column: str) -> bool:
    if cells[column] not in ("yes", "no"):
        raise ValueError(f"{column} is '{cells[column]}'; allowed: yes, no, or nothing")
    return cells[column] == "yes"


def _incumbents(cells: Cells, column: str) -> tuple[tuple[float, float], ...]:
    text = cells[column]
    try:
        return tuple((float(at), float(ms)) for at, ms in (p.split(":") for p in text.split()))
    except ValueError:
        raise ValueError(f"{column} is '{text}'; it has pairs such as 0.25:13.7") from None


_PARSERS: Mapping[str, Callable[[Cells, str], Any]] = {
    **dict.fromkeys(("tables", "gpus"), count),
    **dict.fromkeys(("seconds", "iteration_ms", "rating_ms", "bound_ms"), number),
    **dict.fromkeys(("fits", "rating_fits"), _yes),
    "incumbents": _incumbents,
    "load": lambda cells, column: float(cells[column]),
}
_MAY_LACK = frozenset({"iteration_ms", "fits", "rating_ms", "rating_fits", "bound_ms"})


def _row(cells: Cells) -> SearchRow:
    given: dict[str, Any] = {
        column: _PARSERS[column](cells, column) if column in _PARSERS else cells[column]
        for column in COLUMNS
        if cells[column] or column not in _MAY_LACK
    }
    return SearchRow(**given)


SEARCH_ROWS = RowKind(
    what="row of the search benchmark",
    keys=COLUMNS,
    parse=_row,
    fields=lambda row: {column: _text(getattr(row, column)) for column in COLUMNS},
    comment=_COMMENT,
    remedy="delete this line to run its planner again",
)
"""For `shardopt.measure.store`: one planner on one instance."""


DIGITS = 12
"""Of a digest, in hexadecimal."""
SUFFIXES = (".py", ".yaml", ".csv")
RATING = "baselines"
"""Room of `search` with TorchRec's rating, which is all that TorchRec's own rows take from it."""


@cache
def sources_of(planner: str) -> str:
    """Digest of the code that a planner's rows come from; rows of another are run again.

    That is all of `predictor` with its profiles, which scores every plan, all of `search`, this
    package with its instances. TorchRec's planners do not ask our search, but are of a version of
    torchrec.

    Raises:
        MissingPackageError: there is no torchrec, and it is asked for.
    """
    theirs = planner.startswith(TORCHREC)
    found = Path(search.__file__).parent
    folders = [Path(predictor.__file__).parent, found / RATING if theirs else found]
    with needs_torchrec():
        digest = hashlib.sha256(metadata.version("torchrec").encode() if theirs else b"")
    for folder in [*folders, Path(__file__).parent]:
        for path in _files(folder):
            digest.update(f"\0{folder.name}/{path.relative_to(folder)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:DIGITS]


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.suffix in SUFFIXES)


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


time_ms: Value = attrgetter("time_ms")
"""Objective (a): predicted time of a plan that fits."""
rated_ms: Value = attrgetter("rated_ms")
"""Objective (b): TorchRec's rating of a plan that fits by its count."""


def others(rows: Iterable[SearchRow]) -> list[str]:
    """Planners that are not ours, in the order of the rows; random last."""
    names = dict.fromkeys(r.planner for r in rows if r.planner not in OURS)
    return sorted(names, key=lambda name: name == RANDOM)


def against(
    instances: Mapping[str, InstanceRows],
    planner: str,
    ours: Sequence[str],
    value: Value,
) -> HeadToHead:
    """Ours against one planner by one objective.

    Args:
        ours: planners, of which the best plan counts; the first must have run on an instance.
    """
    both = {name: f for name, f in instances.items() if planner in f and ours[0] in f}
    gains: list[float] = []
    worse: list[str] = []
    only = 0
    for name, rows in both.items():
        found = (value(rows[one]) for one in ours if one in rows)
        mine, theirs = min(filter(None, found), default=None), value(rows[planner])
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


def planners_of(instances: Mapping[str, InstanceRows]) -> Sequence[str]:
    """Every planner that has a row."""
    return list(dict.fromkeys(name for rows in instances.values() for name in rows))
