"""Every planner on every instance of a suite, row by row; a row runs again only if its code has
changed.

Why: docs/decisions/0033-baselines.md.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lab.planners.instances import Instance
from lab.planners.rows import (
    KILLED,
    NO_PLAN,
    OURS,
    RANDOM,
    RATED,
    SEARCH_ROWS,
    SHARDOPT,
    TORCHREC,
    Outcome,
    SearchRow,
    sources_of,
)
from lab.planners.run import PLANNERS, PlannerSettings, run_planner
from predictor.errors import InputError, did_you_mean
from predictor.model.plan import ShardingType
from shardopt.files import decode, read_bytes
from shardopt.measure.machine import machine
from shardopt.measure.store import read_rows, write_rows
from shardopt.ranks.calls import CallError, CallServer, OutOfTime

GRACE_S = 30.0
"""Seconds after its limit at which a call is killed: TorchRec is imported first, and checks the
clock between proposals."""


@dataclass(frozen=True)
class Suite:
    """Instances, and limits in seconds on each: for TorchRec's default planner, for each other
    planner of TorchRec, and for each published planner."""

    instances: tuple[Instance, ...]
    torchrec_limit_s: float
    variant_limit_s: float
    rival_limit_s: float


def load_suite(path: str | Path) -> Suite:
    """Read a suite from an instances file: limits, and groups with an instance for each seed.

    Raises:
        InputError: the file cannot be read or used.
    """
    text = decode(read_bytes(path, "instances file"), path)
    try:
        settings = yaml.safe_load(text)
        if settings.pop("schema") != 1:
            raise ValueError("it does not start with 'schema: 1'")
        groups = enumerate(settings.pop("instances"))
        instances = [instance for at, group in groups for instance in _group(group, at)]
        suite = Suite(tuple(instances), **settings)
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(f"{path}: no instances file: {type(error).__name__}: {error}") from error
    names = [instance.name for instance in instances]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{path}: instances: {twice} appears twice")
    return suite


def _group(group: Mapping[str, Any], index: int) -> list[Instance]:
    try:
        settings = dict(group)
        types = tuple(ShardingType(kind) for kind in settings.pop("sharding_types", ()))
        seeds = settings.pop("seeds")
        return [Instance(seed=seed, sharding_types=types, **settings) for seed in seeds]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"instances[{index}]: {error}") from error


@dataclass(frozen=True)
class SuiteSelection:
    """Selection of a suite's instances and planners.

    Args:
        only: pattern with ``*`` for instance names; all if None.
        planners: names; all if empty.
        effort, seed: of shardopt's searches.
    """

    only: str | None = None
    planners: tuple[str, ...] = ()
    effort: float = 1.0
    seed: int = 0


def check_planners(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names in running order.

    Raises:
        InputError: one names no planner.
    """
    for name in names:
        if name not in PLANNERS:
            raise InputError(
                f"no planner '{name}'{did_you_mean(name, PLANNERS)}; "
                f"there are {', '.join(PLANNERS)}",
                inputs=("planners",),
            )
    return tuple(name for name in PLANNERS if name in names)


def matching(instances: Sequence[Instance], only: str | None) -> list[Instance]:
    """Return the instances whose name matches a pattern; all without one.

    Raises:
        InputError: there are none.
    """
    matches = [instance for instance in instances if fnmatch.fnmatch(instance.name, only or "*")]
    if not matches:
        names = ", ".join(instance.name for instance in instances)
        raise InputError(f"{only!r} matches none of the instances {names}", inputs=("only",))
    return matches


def run_suite(
    suite: Suite, rows: Path, selection: SuiteSelection, say: Callable[[str], None]
) -> list[SearchRow]:
    """Run the planners whose rows are missing or of other code, and write each row once it is
    known.

    Args:
        say: receives a line before each call, and one after.

    Raises:
        InputError: the selection is empty, or the rows cannot be read or written.
        MissingPackageError: one of TorchRec's planners is to run, and it is not installed.
    """
    instances = matching(suite.instances, selection.only)
    present = read_rows(rows, SEARCH_ROWS) if rows.exists() else []
    rows_by_key = {(row.instance, row.planner): row for row in present}
    limited = CallServer(["lab.planners.run"])
    todo = [
        (instance, planner)
        for instance in instances
        for planner in selection.planners or tuple(PLANNERS)
        if not _is_current(rows_by_key.get((instance.name, planner)))
    ]
    for at, (instance, planner) in enumerate(todo, start=1):
        ran = {
            name: row
            for (row_instance, name), row in rows_by_key.items()
            if row_instance == instance.name and _is_current(row)
        }
        settings = _settings_for(suite, selection, planner, ran)
        if settings is None:
            say(
                f"{instance.name}: {planner} waits for the rows of {SHARDOPT} and {RATED}, "
                "whose times it gets"
            )
            continue
        say(f"{at} of {len(todo)}: {instance.name}, {planner}")
        row = _row(instance, planner, _outcome(limited, planner, instance, settings))
        rows_by_key[instance.name, planner] = row
        write_rows(rows, SEARCH_ROWS, list(_ordered(suite, rows_by_key)))
        say(f"    {_describe(row)}")
    return list(_ordered(suite, rows_by_key))


def _is_current(row: SearchRow | None) -> bool:
    """Tell whether there is a row that the present code made."""
    return row is not None and row.sources == sources_of(row.planner)


def _settings_for(
    suite: Suite, selection: SuiteSelection, planner: str, ran: Mapping[str, SearchRow]
) -> PlannerSettings | None:
    """Return the planner's settings; None if its time limit is not known yet.

    Args:
        ran: rows of the instance by planner.
    """
    limits: tuple[float | None, float | None] = (suite.rival_limit_s, suite.rival_limit_s)
    if planner == RANDOM:
        if not {SHARDOPT, RATED} <= ran.keys():
            return None
        limits = (ran[SHARDOPT].seconds, ran[RATED].seconds)
    elif planner in OURS:
        limits = (None, None)
    elif planner == TORCHREC:
        limits = (suite.torchrec_limit_s, None)
    elif planner.startswith(TORCHREC):
        limits = (suite.variant_limit_s, None)
    return PlannerSettings(*limits, selection.effort, selection.seed)


def _outcome(
    limited: CallServer, planner: str, instance: Instance, settings: PlannerSettings
) -> Outcome:
    limit = None
    if settings.limit_s is not None:
        limit = settings.limit_s + (settings.rating_limit_s or 0.0) + GRACE_S
    try:
        return limited.call(limit, run_planner, planner, instance, settings)
    except OutOfTime:
        assert limit is not None
        return Outcome(limit, ended=KILLED)
    except CallError as error:
        reason = str(error).strip().splitlines()[-1]
        raise InputError(f"{instance.name}: {planner} failed: {reason}") from error


def _row(instance: Instance, planner: str, outcome: Outcome) -> SearchRow:
    here = machine()
    return SearchRow(
        **vars(outcome),
        instance=instance.name,
        tables=instance.tables,
        gpus=instance.gpus,
        memory=instance.memory,
        planner=planner,
        machine=f"{here['processor']}, {here['cores']} cores, Python {here['python']}",
        load=float(here["load_average"][0]),
        sources=sources_of(planner),
    )


def _ordered(suite: Suite, rows_by_key: dict[tuple[str, str], SearchRow]) -> Iterator[SearchRow]:
    """Yield rows in the suite's order of instances, then of planners; unknown ones last."""
    order = {instance.name: at for at, instance in enumerate(suite.instances)}
    planners = {name: at for at, name in enumerate(PLANNERS)}
    last = len(order) + len(planners)
    yield from sorted(
        rows_by_key.values(),
        key=lambda r: (order.get(r.instance, last), planners.get(r.planner, last)),
    )


def _describe(row: SearchRow) -> str:
    """Describe a row in words."""
    if row.iteration_ms is None and row.rating_ms is None:
        why = {NO_PLAN: "found no plan", KILLED: "was ended without a plan"}
        return f"{why.get(row.ended, 'has no plan that fits')} in {row.seconds:.1f} s"
    time, rating = (
        "-" if ms is None else f"{ms:.3f} ms" for ms in (row.iteration_ms, row.rating_ms)
    )
    doubt = "" if row.fits else ", which does not fit"
    return f"{time}{doubt}; rated {rating}; {row.seconds:.1f} s, ended by {row.ended}"
