"""Every planner on every instance of a suite, row by row; what is there is not run again unless
the code that it comes from has changed.

Why: docs/decisions/0033-baselines.md.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

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
from predictor.document import Problems, parse_yaml, shown
from predictor.errors import InputError, did_you_mean
from predictor.model.plan import ShardingType
from shardopt.config.schema import (
    PIPELINES,
    Name,
    SchemaVersion,
    Section,
    check,
    choice,
    flag,
    real,
    whole,
)
from shardopt.files import decode, read_bytes
from shardopt.measure.machine import machine
from shardopt.measure.store import read_rows, write_rows
from shardopt.ranks.calls import CallError, CallServer, OutOfTime

GRACE_S = 30.0
"""A call is killed this long after its limit: TorchRec is imported first, and looks at the clock
between proposals."""

Seconds = Annotated[float, real(0, 1e6, above=True)]


class SuiteSection(Section):
    """The keys of an instances file."""

    schema_: SchemaVersion = Field(
        alias="schema", description="the version of this file format: 'schema: 1'"
    )
    torchrec_limit_s: Seconds = Field(description="what TorchRec's default planner may take")
    variant_limit_s: Seconds = Field(description="what each other planner of TorchRec may take")
    rival_limit_s: Seconds = Field(description="what each of the papers' planners may take")
    instances: list[Any] = Field(description="groups of instances")


class GroupSection(Section):
    """A group of instances: one for each seed."""

    tables: Annotated[int, whole(1, 10_000)] = Field(description="the number of tables")
    gpus: Annotated[int, whole(1, 1024)] = Field(description="the number of GPUs")
    fill: Annotated[float, real(0, 1, above=True)] = Field(description="the share of memory taken")
    seeds: list[Annotated[int, whole(0, 2**31)]] = Field(description="one instance for each")
    packed: Annotated[bool, flag()] = False
    sharding_types: list[Annotated[str, choice(ShardingType)]] = Field(default_factory=list)
    hardware: Name = "h100-sxm"
    train_pipeline: Annotated[str, choice(PIPELINES)] = "sparse_dist"


@dataclass(frozen=True)
class Suite:
    """Instances, and the seconds that others may take on each."""

    instances: tuple[Instance, ...]
    torchrec_limit_s: float
    variant_limit_s: float
    baseline_limit_s: float


def load_suite(path: str | Path) -> Suite:
    """The suite of an instances file.

    Raises:
        InputError: the file cannot be read or used; has a line for every problem.
    """
    problems = Problems(str(path))
    raw = parse_yaml(decode(read_bytes(path, "instances file"), path), problems)
    if not isinstance(raw, dict):
        raise InputError(
            f"{path}:1: got {shown(raw)}; an instances file is a mapping that starts with "
            "'schema: 1'"
        )
    section = check(SuiteSection, raw, (), problems)
    found: dict[str, Instance] = {}
    for index, group in enumerate(section.instances if section else ()):
        for instance in _group(group, index, problems):
            if instance.name in found:
                problems.add(("instances", index), f"{instance.name} is there twice")
            found[instance.name] = instance
    problems.raise_if_any()
    assert section is not None
    limits = section.torchrec_limit_s, section.variant_limit_s, section.rival_limit_s
    return Suite(tuple(found.values()), *limits)


def _group(group: object, index: int, problems: Problems) -> list[Instance]:
    path = ("instances", index)
    if not isinstance(group, dict):
        problems.add(path, f"got {shown(group)}; a group is a mapping with tables, gpus, ...")
        return []
    section = check(GroupSection, group, path, problems)
    if section is None:
        return []
    types = tuple(ShardingType(t) for t in section.sharding_types)
    if section.packed and types and ShardingType.TABLE_WISE not in types:
        problems.add(path, "the packing is one of whole tables: sharding_types needs table_wise")
    if section.gpus > 8 and section.gpus % 8:
        problems.add((*path, "gpus"), f"got {section.gpus}; more than 8 must be hosts of 8")
    given = section.model_dump(exclude={"seeds", "sharding_types"})
    return [Instance(seed=seed, sharding_types=types, **given) for seed in section.seeds]


@dataclass(frozen=True)
class SuiteSelection:
    """What of a suite to run.

    Args:
        only: pattern with ``*`` that an instance's name matches; all if None.
        planners: names; all if empty.
        effort, seed: of shardopt's searches.
    """

    only: str | None = None
    planners: tuple[str, ...] = ()
    effort: float = 1.0
    seed: int = 0


def check_planners(names: Sequence[str]) -> tuple[str, ...]:
    """The names, in the order in which they run.

    Raises:
        InputError: one is none.
    """
    for name in names:
        if name not in PLANNERS:
            raise InputError(
                f"no planner '{name}'{did_you_mean(name, PLANNERS)}; "
                f"there are {', '.join(PLANNERS)}",
                inputs=("planners",),
            )
    return tuple(name for name in PLANNERS if name in names)


def run_suite(
    suite: Suite, rows: Path, selection: SuiteSelection, say: Callable[[str], None]
) -> list[SearchRow]:
    """Run what is not among the rows yet, or is of other code, and write each row as soon as it is
    known.

    Args:
        say: a line before each call, and one after.

    Raises:
        InputError: the selection is empty, or the rows cannot be read or written.
        MissingPackageError: one of TorchRec's planners is to run, and it is not installed.
    """
    instances = [i for i in suite.instances if fnmatch.fnmatch(i.name, selection.only or "*")]
    if not instances:
        names = ", ".join(i.name for i in suite.instances)
        raise InputError(
            f"{selection.only!r} matches none of the instances {names}", inputs=("only",)
        )
    found = (
        {(r.instance, r.planner): r for r in read_rows(rows, SEARCH_ROWS)} if rows.exists() else {}
    )
    limited = CallServer(["lab.planners.run"])
    todo = [
        (instance, planner)
        for instance in instances
        for planner in selection.planners or tuple(PLANNERS)
        if not _is_current(found.get((instance.name, planner)))
    ]
    for at, (instance, planner) in enumerate(todo, start=1):
        ran = {
            name: row
            for (of, name), row in found.items()
            if of == instance.name and _is_current(row)
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
        found[instance.name, planner] = row
        write_rows(rows, SEARCH_ROWS, list(_ordered(suite, found)))
        say(f"    {_describe(row)}")
    return list(_ordered(suite, found))


def _is_current(row: SearchRow | None) -> bool:
    """There is a row, and this code made it."""
    return row is not None and row.sources == sources_of(row.planner)


def _settings_for(
    suite: Suite, selection: SuiteSelection, planner: str, ran: Mapping[str, SearchRow]
) -> PlannerSettings | None:
    """What the planner gets; None if its time is not known yet.

    Args:
        ran: rows of the instance by planner.
    """
    limits: tuple[float | None, float | None] = (suite.baseline_limit_s, suite.baseline_limit_s)
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


def _ordered(suite: Suite, found: dict[tuple[str, str], SearchRow]) -> Iterator[SearchRow]:
    """Rows by instance as the suite has them, then by planner; those of neither last."""
    order = {instance.name: at for at, instance in enumerate(suite.instances)}
    planners = {name: at for at, name in enumerate(PLANNERS)}
    last = len(order) + len(planners)
    yield from sorted(
        found.values(),
        key=lambda r: (order.get(r.instance, last), planners.get(r.planner, last)),
    )


def _describe(row: SearchRow) -> str:
    """A row in words."""
    if row.iteration_ms is None and row.rating_ms is None:
        why = {NO_PLAN: "found no plan", KILLED: "was ended without a plan"}
        return f"{why.get(row.ended, 'has no plan that fits')} in {row.seconds:.1f} s"
    time = "-" if row.iteration_ms is None else f"{row.iteration_ms:.3f} ms"
    rating = "-" if row.rating_ms is None else f"{row.rating_ms:.3f} ms"
    doubt = "" if row.fits else ", which does not fit"
    return f"{time}{doubt}; rated {rating}; {row.seconds:.1f} s, ended by {row.ended}"
