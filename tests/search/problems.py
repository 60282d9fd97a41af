"""Problems that the tests of the search share: small models on few ranks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.model.distribution import Uniform, Zipf
from predictor.model.plan import ShardingPlan
from predictor.model.topology import Topology
from predictor.model.workload import Constraints, DenseArch, Feature, QComm, Table, Workload
from predictor.units import GIB, MIB
from search.bound.lower_bound import LowerBound
from search.in_use.plan import check_plan_in_use, space_near
from search.objective import Assignment, Objective
from search.params import DEFAULT, SearchParams
from search.problem import PlanInUse, Problem, silent
from search.space.enumerate import reduced_space
from search.space.option import Choice, Option, Space
from search.state import Tools
from search.stop import Stop
from search.surrogate import Surrogate

DENSE = DenseArch(13, (64, 32), (64, 1), "concat")
H100 = load_hardware("h100-sxm")
CPU = load_hardware("cpu-gloo")


def a_table(
    name: str = "t",
    rows: int = 100_000,
    dim: int = 64,
    pooling_factor: float = 4.0,
    alpha: float | None = None,
    id_order: str = "random",
    **more: Any,
) -> Table:
    ids = Uniform() if alpha is None else Zipf(alpha)
    feature = Feature(f"{name}_f", pooling_factor, distribution=ids, id_order=id_order)
    return Table(name, rows, dim, (feature,), **more)


def a_workload(*tables: Table, batch_size: int = 4096, **more: Any) -> Workload:
    return Workload("w", batch_size, tables, DENSE, **more)


def copying(profile: HardwareProfile, columns: float = 0.02) -> HardwareProfile:
    """Free framework code and slow copies: what exchanges copy sets much of the time."""
    costs = profile.overheads
    free = {n: 0.0 for n, v in costs if n.endswith("_us") and isinstance(v, float)}
    overheads = costs.model_copy(update=free)
    moves = profile.elementwise.model_copy(update={"columns": columns})
    return profile.model_copy(update={"overheads": overheads, "elementwise": moves})


def hosts(
    world: int, local: int | None = None, hbm: int = 80 * GIB, ddr: int = 256 * GIB
) -> Topology:
    return Topology.uniform(world, local, hbm_bytes=hbm, ddr_bytes=ddr)


def a_problem(
    workload: Workload, topology: Topology, hardware: str | HardwareProfile = H100
) -> Problem:
    profile = load_hardware(hardware) if isinstance(hardware, str) else hardware
    return Problem(workload, topology, profile)


def objective_of(problem: Problem, space: Space | None = None) -> tuple[Objective, Surrogate]:
    objective = Objective(problem, reduced_space(problem) if space is None else space)
    return objective, Surrogate(objective)


def objective_near(problem: Problem, in_use: PlanInUse) -> Objective:
    near = check_plan_in_use(replace(problem, in_use=in_use))
    return Objective(near, space_near(reduced_space(near), near))


def tools_of(problem: Problem, effort: float = 1.0, params: SearchParams = DEFAULT) -> Tools:
    """Tools for a search of the problem's space without host memory where that does."""
    objective, surrogate = objective_of(problem, space_near(reduced_space(problem), problem))
    bound = LowerBound(problem, objective.space, objective.scorer)
    stop = Stop(effort=effort)
    return Tools(objective, surrogate, bound, stop, 0, params.scaled(effort), silent)


def several_lookups(seed: int, tables: int = 10) -> Problem:
    """Tables whose lookups are most of an iteration, on two CPU ranks."""
    rng = random.Random(seed)
    built = [
        a_table(
            f"t{i}", int(10 ** rng.uniform(3, 5.5)), rng.choice([16, 64, 128]), rng.uniform(1, 40)
        )
        for i in range(tables)
    ]
    return a_problem(a_workload(*built, batch_size=2048), hosts(2), CPU)


def random_problem(seed: int, *, world: tuple[int, int] | None = None, tables: int = 6) -> Problem:
    """Tables, pipeline, dtypes, modules, constraints, ranks and memory at random."""
    rng = random.Random(seed)
    ranks, local = world or rng.choice([(2, 2), (3, 3), (4, 4), (4, 2), (8, 4)])
    modules = rng.choice([("ebc",), ("ebc",), ("user", "item")])
    chosen = [_random_table(rng, f"t{i}", ranks, modules) for i in range(tables)]
    if rng.random() < 0.3:
        chosen[:2] = [_with(t, co_locate="together", ranks=None) for t in chosen[:2]]
    workload = a_workload(
        *chosen,
        batch_size=rng.choice([512, 8192]),
        train_pipeline=rng.choice(["base", "sparse_dist", "prefetch_sparse_dist"]),
        qcomm=QComm(rng.choice(["fp32", "fp16"]), rng.choice(["fp32", "bf16"])),
    )
    need = sum(t.weight_bytes for t in workload.tables) / ranks
    fill = rng.choice([0.05, 1.5, 3.0])
    # ids and outputs in flight of all tables together: a third of these problems lacks room for
    # weights, not for a batch
    flight = sum(3 * t.embedding_dim * 4 + 20 * t.lookups_per_sample * 8 for t in workload.tables)
    caps = [
        int(fill * need + 48 * MIB + flight * ranks * workload.batch_size) for _ in range(ranks)
    ]
    if rng.random() < 0.3:
        caps[-1] *= 2
    topology = Topology(ranks, local, tuple(caps), (64 * GIB,) * ranks)
    return a_problem(workload, topology)


def _random_table(rng: random.Random, name: str, ranks: int, modules: tuple[str, ...]) -> Table:
    wants = Constraints(
        ranks=tuple(sorted(rng.sample(range(ranks), rng.randint(1, ranks))))
        if rng.random() < 0.2
        else None,
        min_partition=rng.choice([None, None, 16]),
        cache_load_factor=rng.choice([None, 0.1]),
    )
    return a_table(
        name,
        int(10 ** rng.uniform(2.0, 6.0)),
        rng.choice([16, 32, 64, 128]),
        rng.choice([0.5, 1.0, 5.0, 30.0]),
        rng.choice([None, 0.8, 1.2]),
        rng.choice(["random", "frequency"]),
        module=rng.choice(modules),
        data_type=rng.choice(["fp32", "fp32", "fp16"]),
        optimizer=rng.choice(["exact_row_wise_adagrad", "adam"]),
        constraints=wants,
    )


def _with(table: Table, **changes: Any) -> Table:
    return replace(table, constraints=replace(table.constraints, **changes))


def placements(option: Option, topology: Topology) -> Iterator[tuple[int, ...]]:
    """Every legal placement of an option; those of like column shards once."""
    legal = option.legal_ranks(topology)
    choose = itertools.product
    ordered = len(legal.units) > 1
    for runs in choose(*legal.units):
        if ordered and list(runs) != sorted(runs):
            continue
        ranks = tuple(r for run in runs for r in run)
        if option.is_legal(ranks, topology):
            yield ranks


def every_plan(objective: Objective) -> Iterator[Assignment]:
    """Every plan of the space that fits."""
    topology = objective.problem.topology
    tables: list[list[Choice]] = [
        [(o, ranks) for o in options for ranks in placements(o, topology)]
        for options in objective.space.options
    ]
    for plan in itertools.product(*tables):
        if objective.fits(plan):
            yield plan


def random_plan(objective: Objective, rng: random.Random) -> Assignment:
    """Any legal plan, whether it fits or not; two in three use few sharding types."""
    topology = objective.problem.topology
    kinds = sorted({o.sharding_type for opts in objective.space.options for o in opts})
    liked = set(rng.sample(kinds, min(len(kinds), rng.randint(1, 3))))
    plan = []
    for options in objective.space.options:
        candidates = [o for o in options if o.sharding_type in liked] or list(options)
        option = rng.choice(candidates)
        legal = option.legal_ranks(topology)
        units = legal.units
        if legal.same_group:
            group = topology.group_of(rng.choice(units[0])[0])
            units = tuple(
                tuple(a for a in unit if topology.group_of(a[0]) == group) for unit in units
            )
        plan.append((option, tuple(r for unit in units for r in rng.choice(unit))))
    return tuple(plan)


def assert_valid(objective: Objective, plan: Assignment) -> None:
    """Tiles the tables, honours every constraint, fits every cap."""
    from predictor.model.plan_check import check_plan

    problem = objective.problem
    check_plan(objective.sharding_plan(plan), problem.workload)
    for table, (option, ranks) in zip(problem.workload.tables, plan, strict=True):
        wants = table.constraints
        assert option.is_legal(ranks, problem.topology), (option.label, ranks)
        assert wants.ranks is None or set(ranks) <= set(wants.ranks)
        assert wants.sharding_types is None or option.sharding_type in wants.sharding_types
        assert wants.compute_kernels is None or option.compute_kernel in wants.compute_kernels
    together: dict[str, set[frozenset[int]]] = {}
    for table, (_, ranks) in zip(problem.workload.tables, plan, strict=True):
        if table.constraints.co_locate:
            together.setdefault(table.constraints.co_locate, set()).add(frozenset(ranks))
    assert all(len(kinds) == 1 for kinds in together.values())
    assert bool(np.all(objective.memory(plan) <= objective.caps))


def some_plan(problem: Problem, seed: int) -> ShardingPlan:
    """Any plan that fits."""
    objective = Objective(problem, reduced_space(problem))
    rng = random.Random(seed)
    drawn = (random_plan(objective, rng) for _ in range(500))
    return objective.sharding_plan(next(plan for plan in drawn if objective.fits(plan)))


class Ticks:
    """A clock that goes on by so many seconds whenever it is looked at."""

    def __init__(self, step: float) -> None:
        self.step, self.now = step, 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def large_tables(seed: int) -> Problem:
    """Tables of gigabytes, which take longer to move than an iteration takes."""
    rng = random.Random(seed)
    tables = [a_table(f"t{i}", rng.randint(10, 20) * 10**6, 64, 8.0, 1.05) for i in range(6)]
    return a_problem(a_workload(*tables, batch_size=8192), hosts(2), copying(H100))
