"""Planners after published papers and sources, and TorchRec's own rating of any plan.

A planner proposes plans; the best one that fits counts, by shardopt's prediction or by TorchRec's
rating. docs/decisions/0033-baselines.md gives the reasons and the differences from the papers.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from lab.planners.greedy import Array, Ints, Shards, place_greedily
from predictor.model.memory.ranks import ShardMemory
from predictor.model.plan import ComputeKernel, ShardingType, TablePlan
from predictor.model.topology import Topology
from predictor.model.workload import Table, Workload
from search.baselines.starting_plans import GREEDY
from search.baselines.torchrec_memory import torchrec_memory
from search.baselines.torchrec_planner import Bandwidths, CostModel
from search.objective import Assignment, Objective
from search.partitioner import GreedyPartitioner
from search.problem import Problem
from search.space.enumerate import enumerate_space, reduced_space
from search.space.filters import deduplicate, drop_uvm, prune
from search.space.option import Choice, Option, Space
from search.stop import Stop
from search.surrogate import BACKWARD, FORWARD, Surrogate


class TorchRecObjective:
    """TorchRec's own estimate as an objective: rating and memory of any plan of one workload.

    The rating is that of `NoopPerfModel.rate` (planner/perf_models.py): the largest sum of shard
    costs on a rank. Memory follows `EmbeddingStorageEstimator` (planner/shard_estimators.py)
    with its default pipeline type. Both also cover options that TorchRec does not enumerate: its
    estimator takes shards of any size.

    Args:
        topology: caps after the reservation.
    """

    def __init__(self, workload: Workload, topology: Topology, device: str = "cuda") -> None:
        self.workload = replace(workload, train_pipeline="base")
        self.topology = topology
        self.device = device
        self._model = CostModel(self.workload, topology, device, Bandwidths())
        self._caps = np.array([topology.hbm_cap_bytes, topology.ddr_cap_bytes], dtype=np.float64)

    def cost_ms(self, option: Option) -> float:
        """Return the cost of each shard of an option in ms; it does not depend on the rank."""
        return self._model.shard_perf(option).total

    def memory(self, option: Option) -> tuple[ShardMemory, ...]:
        """Return the memory of every shard of an option."""
        return tuple(
            torchrec_memory(
                self.workload.tables[option.table],
                self.workload,
                self.topology,
                option.sharding_type,
                option.compute_kernel,
                option.sizes,
                option.cache_load_factor,
                device=self.device,
            )
        )

    def with_torchrec_memory(self, space: Space) -> Space:
        """Return the space with TorchRec's count of memory in every option."""
        options = tuple(
            tuple(replace(option, memory=self.memory(option)) for option in table)
            for table in space.options
        )
        return replace(space, options=options)

    def rating_ms(self, plan: Sequence[TablePlan]) -> float:
        """Return the rating of a plan, whose tables are in the workload's order."""
        loads = np.zeros(self.topology.world_size)
        for option, ranks in _placed(plan):
            np.add.at(loads, list(ranks), self.cost_ms(option))
        return float(loads.max())

    def fits(self, plan: Sequence[TablePlan]) -> bool:
        """Tell whether every rank has room for its shards by TorchRec's count."""
        used = np.zeros_like(self._caps)
        for option, ranks in _placed(plan):
            for rank, need in zip(ranks, self.memory(option), strict=True):
                used[:, rank] += need.hbm_bytes, need.ddr_bytes
        return bool((used <= self._caps).all())


def _placed(plan: Sequence[TablePlan]) -> Iterator[Choice]:
    """Yield every table's option, built from its shards, with their ranks."""
    for index, table in enumerate(plan):
        option = Option(
            index,
            table.sharding_type,
            table.compute_kernel,
            tuple(shard.size for shard in table.shards),
            tuple(shard.offset for shard in table.shards),
            module=table.module,
            cache_load_factor=table.cache_load_factor,
        )
        yield option, tuple(table.ranks)


class PlannerInputs:
    """Inputs of a planner: the problem's options, their memory, and costs of shards.

    Args:
        torchrec: counts memory; shardopt's count if None.
    """

    def __init__(self, problem: Problem, torchrec: TorchRecObjective | None = None) -> None:
        self.problem, self.torchrec = problem, torchrec
        if torchrec is None:
            space = reduced_space(problem)
        else:
            topology = problem.topology
            space = enumerate_space(problem.workload, topology, problem.hardware.device)
            space = deduplicate(torchrec.with_torchrec_memory(space), topology)
            space = drop_uvm(prune(space, topology), topology)
        self.objective = Objective(problem, space)
        self.surrogate = Surrogate(self.objective)

    @property
    def options(self) -> Sequence[Sequence[Option]]:
        """Options of every table."""
        return self.objective.space.options


Planner = Callable[[PlannerInputs, int, Stop], Iterator[Assignment]]
"""(inputs, seed, stop) -> plans worth scoring, even if they do not fit; ends by itself or once
``stop`` is reached."""
SCORED_TOGETHER = 32


def best_ms(planner: Planner, inputs: PlannerInputs, seed: int, stop: Stop) -> float | None:
    """Return the lowest predicted time of a planner's plans that fit, or the lowest rating where
    TorchRec counts memory; None if none fits."""
    best: float | None = None
    rate = _rating(inputs) if inputs.torchrec else inputs.objective.score
    proposals = planner(inputs, seed, stop)
    while proposed := list(itertools.islice(proposals, SCORED_TOGETHER)):
        fitting = [plan for plan in proposed if inputs.objective.fits(plan)]
        if fitting:
            least = float(min(rate(fitting)))
            best = least if best is None else min(best, least)
    return best


def _rating(inputs: PlannerInputs) -> Callable[[Sequence[Assignment]], Array]:
    """Return a function that rates plans: the costliest rank's sum of shard costs, ``[plans]``."""
    assert inputs.torchrec is not None
    cost_ms, world = cache(inputs.torchrec.cost_ms), inputs.problem.topology.world_size

    def rate(plans: Sequence[Assignment]) -> Array:
        loads = np.zeros((len(plans), world))
        for load, plan in zip(loads, plans, strict=True):
            for option, ranks in plan:
                np.add.at(load, list(ranks), cost_ms(option))
        return np.asarray(loads.max(axis=1))

    return rate


ON_DEVICE = (ComputeKernel.FUSED, ComputeKernel.DENSE)


def list_halvings(options: Sequence[Option]) -> list[Option]:
    """Return the options of one whole table, then of 2, 4, 8, ... column shards.

    A table that must be split begins with its coarsest split. The list is empty if its
    constraints allow neither.
    """
    by_shards: dict[int, Option] = {}
    for option in options:
        whole = option.sharding_type is ShardingType.TABLE_WISE
        split = option.sharding_type is ShardingType.COLUMN_WISE
        power_of_two = option.num_shards & (option.num_shards - 1) == 0
        if option.compute_kernel in ON_DEVICE and (whole or split) and power_of_two:
            by_shards.setdefault(option.num_shards, option)
    return [by_shards[count] for count in sorted(by_shards)]


def option_of_type(options: Sequence[Option], sharding_type: ShardingType) -> Option | None:
    """Return the table's option of this type in device memory, if it has one."""
    fitting = (
        o for o in options if o.sharding_type is sharding_type and o.compute_kernel in ON_DEVICE
    )
    return next(fitting, None)


def shards_of(chosen: Sequence[Option], costs: Sequence[Array]) -> tuple[Shards, Ints]:
    """Return all shards of the chosen options, and the index of each shard's option.

    Args:
        costs: of every shard of every option.
    """
    owner = np.repeat(np.arange(len(chosen)), [o.num_shards for o in chosen])
    memory = np.array(
        [(m.hbm_bytes, m.ddr_bytes) for o in chosen for m in o.memory], dtype=np.float64
    ).reshape(-1, 2)
    dims = np.array([size[1] for o in chosen for size in o.sizes], dtype=np.float64)
    return Shards(np.concatenate([np.zeros(0), *costs]), memory, dims), owner


def with_ranks(chosen: Sequence[Option], owner: Ints, ranks: Ints) -> Assignment:
    """Return the chosen options, each with the ranks of its shards."""
    return tuple(
        (option, tuple(ranks[owner == index].tolist())) for index, option in enumerate(chosen)
    )


GREEDY_SHARE = 0.5
"""Share of random plans that are placed greedily; the rest have random ranks."""


def random_plans(inputs: PlannerInputs, seed: int, stop: Stop) -> Iterator[Assignment]:
    """Yield random options of few sharding types, on random or greedily chosen ranks.

    Ends when ``stop`` is reached, so it must have a time limit.
    """
    rng = random.Random(seed)
    placer = GreedyPartitioner(inputs.objective, inputs.surrogate)
    kinds = list(ShardingType)
    while not stop.reached():
        # uniform draws over all options give no good plan, so types are drawn first
        allowed = set(rng.sample(kinds, rng.randint(1, len(kinds))))
        options = [
            rng.choice([o for o in table if o.sharding_type in allowed] or list(table))
            for table in inputs.options
        ]
        if rng.random() < GREEDY_SHARE:
            plan = placer.place_all(options)
        else:
            plan = _anywhere(inputs, options, rng)
        if plan is not None:
            yield plan


def _anywhere(
    inputs: PlannerInputs, options: list[Option], rng: random.Random
) -> Assignment | None:
    plan = []
    for option in options:
        legal = inputs.objective.legal(option)
        if legal.same_group:
            size = inputs.problem.topology.intra_group_size
            first = rng.randrange(inputs.problem.topology.groups) * size
            ranks = tuple(rng.randrange(first, first + size) for _ in legal.units)
            if not option.is_legal(ranks, inputs.problem.topology):
                return None
        else:
            ranks = tuple(r for unit in legal.units for r in rng.choice(unit))
        plan.append((option, ranks))
    return tuple(plan)


BEAM = 3
CANDIDATES = 10
MOST_SPLITS = 10
LIMITS = np.linspace(1.0, 1.5, 11)
"""Limits on the columns of a rank, over the mean."""


def neuroshard(inputs: PlannerInputs, seed: int, stop: Stop) -> Iterator[Assignment]:
    """Run NeuroShard (Zha et al. 2023): beam search over column splits around a greedy grid.

    Yields every plan that is cheaper than those before.
    """
    steps = [list_halvings(options) for options in inputs.options]
    if not all(steps):
        return

    def chosen(splits: tuple[int, ...]) -> list[Option]:
        """Return each table's option after its number of halvings."""
        return [options[at] for options, at in zip(steps, splits, strict=True)]

    whole = (0,) * len(steps)
    best, plan = _packed(inputs, chosen(whole))
    if plan is not None:
        yield plan
    beam = [(best, whole)]
    for _ in range(MOST_SPLITS):
        costs: dict[tuple[int, ...], float] = {}
        for _, splits in beam:
            for table in _candidates(inputs, chosen(splits)):
                finer = (*splits[:table], splits[table] + 1, *splits[table + 1 :])
                if finer in costs or finer[table] >= len(steps[table]):
                    continue
                cost, plan = _packed(inputs, chosen(finer))
                costs[finer] = cost
                if plan is not None and cost < best:
                    best = cost
                    yield plan
                if stop.reached():
                    return
        beam = sorted((cost, splits) for splits, cost in costs.items())[:BEAM]


def _candidates(inputs: PlannerInputs, chosen: list[Option]) -> list[int]:
    """Return the tables with the largest and with the costliest shards."""
    size = np.array([max(m.hbm_bytes for m in o.memory) for o in chosen])
    cost = np.array([inputs.surrogate.phases(o)[0, [FORWARD, BACKWARD]].sum() for o in chosen])
    both = (np.argsort(-values, kind="stable")[:CANDIDATES] for values in (size, cost))
    return sorted({int(table) for tables in both for table in tables})


def _packed(inputs: PlannerInputs, chosen: list[Option]) -> tuple[float, Assignment | None]:
    """Return the cheapest greedy placement, by computation and communication of the costliest
    rank."""
    phases = [inputs.surrogate.phases(option) for option in chosen]
    computation = [p[:, [FORWARD, BACKWARD]].sum(axis=1) for p in phases]
    shards, owner = shards_of(chosen, computation)
    world = inputs.problem.topology.world_size
    mean = float(shards.dims.sum()) / world
    everything = np.concatenate([p.sum(axis=1) for p in phases])
    best: tuple[float, Assignment | None] = (np.inf, None)
    for ranks in place_greedily(shards, inputs.objective.caps.T, (LIMITS * mean).tolist()):
        if ranks is not None:
            cost = float(np.bincount(ranks, everything, world).max())
            if cost < best[0]:
                best = cost, with_ranks(chosen, owner, ranks)
    return best


PARTS = 4
"""Weights of a mixture are multiples of one over this."""


def dreamshard_greedy(inputs: PlannerInputs, seed: int, stop: Stop) -> Iterator[Assignment]:
    """Place whole tables greedily by every mixture of the baseline costs of AutoShard and
    DreamShard (Zha et al. 2022); their learned policies are not implemented."""
    chosen = [option_of_type(options, ShardingType.TABLE_WISE) for options in inputs.options]
    whole = [option for option in chosen if option is not None]
    if len(whole) < len(chosen):
        return
    tables = inputs.problem.workload.tables
    costs = np.array([[weight(t) for t in tables] for weight in GREEDY.values()])
    costs /= costs.sum(axis=1, keepdims=True)
    for mixture in itertools.product(range(PARTS + 1), repeat=len(costs)):
        if sum(mixture) != PARTS:
            continue
        if stop.reached():
            return
        shards, owner = shards_of(whole, [np.array([c]) for c in np.array(mixture) @ costs])
        (ranks,) = place_greedily(shards, inputs.objective.caps.T)
        if ranks is not None:
            yield with_ranks(whole, owner, ranks)


SPLITS = 20
THRESHOLDS_BYTES = (0, 10**5, 10**6, 10**7, 10**8)
"""Tables of at most this size are data-parallel; submissions use 0 to some hundred MB."""
NVLINK_RATIO, NIC_RATIO = 7.4, 67.0
"""``mem_comm_bw_ratio`` of the submissions: HBM of 3.35 TB/s over NVLink's 450 GB/s, or over a
NIC's 50 GB/s where there are several hosts."""
WORK_RATIO = 4
"""``mem_comm_work_ratio``: bytes a weight is read and written for one that is sent."""


def hugectr(inputs: PlannerInputs, seed: int, stop: Stop) -> Iterator[Assignment]:
    """Run HugeCTR's planner of MLPerf: small tables are data-parallel, hot ones split repeatedly.

    Yields a plan after each split, for every threshold and both ways of splitting.
    """
    for threshold, by_rows in itertools.product(THRESHOLDS_BYTES, (False, True)):
        ladders = [
            _ladder(inputs.problem.workload.tables[t], options, threshold, by_rows)
            for t, options in enumerate(inputs.options)
        ]
        if not all(ladders):
            continue
        position = [0] * len(ladders)
        for _ in range(SPLITS + 1):
            if stop.reached():
                return
            chosen = [ladder[i] for ladder, i in zip(ladders, position, strict=True)]
            plan = _assigned(inputs, chosen)
            if plan is not None:
                yield plan
            heat = [
                _cost(inputs, o) if i + 1 < len(ladder) else -1.0
                for o, ladder, i in zip(chosen, ladders, position, strict=True)
            ]
            hottest = int(np.argmax(heat))
            if heat[hottest] < 0:
                break
            position[hottest] += 1


def _ladder(table: Table, options: Sequence[Option], threshold: int, rows: bool) -> list[Option]:
    """Return a table's options, each a finer split than the one before."""
    replica = option_of_type(options, ShardingType.DATA_PARALLEL)
    if table.weight_bytes <= threshold and replica is not None:
        return [replica]
    columns = list_halvings(options)
    by_row = option_of_type(options, ShardingType.ROW_WISE)
    ladder = columns[:1] if rows else columns
    return [*ladder, by_row] if by_row is not None else ladder


def _cost(inputs: PlannerInputs, option: Option) -> float:
    """Return the cost of each shard: columns times (ids read + embeddings sent)."""
    table = inputs.problem.workload.tables[option.table]
    topology = inputs.problem.topology
    ratio = NVLINK_RATIO if topology.hosts == 1 else NIC_RATIO
    share = topology.world_size if option.sharding_type is ShardingType.ROW_WISE else 1
    sent = ratio / WORK_RATIO * len(table.features)
    return option.column_width * (table.lookups_per_sample / share + sent)


def _assigned(inputs: PlannerInputs, chosen: Sequence[Option]) -> Assignment | None:
    everyone = tuple(range(inputs.problem.topology.world_size))
    everywhere = (ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL)
    placed: dict[int, Choice] = {}
    room: Array = inputs.objective.caps.T.copy()
    free: list[Option] = []
    for option in chosen:
        if option.num_shards == len(everyone) and option.sharding_type in everywhere:
            placed[option.table] = (option, everyone)
            room -= inputs.objective.footprint(option, everyone).T
        else:
            free.append(option)
    shards, owner = shards_of(free, [np.full(o.num_shards, _cost(inputs, o)) for o in free])
    (ranks,) = place_greedily(shards, room)
    if ranks is None or (room < 0).any():
        return None
    placed |= {choice[0].table: choice for choice in with_ranks(free, owner, ranks)}
    return tuple(placed[table] for table in range(len(inputs.options)))
