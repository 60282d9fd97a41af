"""TorchRec's own estimate as an objective: rating and memory of any plan.

The rating is that of `NoopPerfModel.rate` (planner/perf_models.py): the largest sum of shard costs
on a rank. Memory is what `EmbeddingStorageEstimator` (planner/shard_estimators.py) counts with its
default pipeline type. Both are for options that TorchRec does not enumerate, too: its estimator
takes shards of any size.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from predictor.model.memory.ranks import ShardMemory
from predictor.model.plan import ComputeKernel, ShardingType, TablePlan
from predictor.model.topology import Topology
from predictor.model.workload import Table, Workload
from search.baselines.greedy import Array, Ints, Shards, place_greedily
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
    """Rates plans of one workload.

    Args:
        topology: caps after the reservation.
        bandwidths: TorchRec's defaults if None.
    """

    def __init__(
        self,
        workload: Workload,
        topology: Topology,
        device: str = "cuda",
        bandwidths: Bandwidths | None = None,
    ) -> None:
        self.workload = replace(workload, train_pipeline="base")
        self.topology = topology
        self.device = device
        self._model = CostModel(self.workload, topology, device, bandwidths or Bandwidths())
        self._caps = np.array([topology.hbm_cap_bytes, topology.ddr_cap_bytes], dtype=np.float64)

    def cost_ms(self, option: Option) -> float:
        """Cost of each shard of an option; it does not depend on the rank."""
        return self._model.shard_perf(option).total

    def memory(self, option: Option) -> tuple[ShardMemory, ...]:
        """What every shard of an option needs on its rank."""
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
        """The same options with their memory as TorchRec counts it."""
        options = tuple(
            tuple(replace(option, memory=self.memory(option)) for option in table)
            for table in space.options
        )
        return replace(space, options=options)

    def rating_ms(self, plan: Sequence[TablePlan]) -> float:
        """Rating of a plan; ``plan`` has a table each in the workload's order."""
        loads = np.zeros(self.topology.world_size)
        for option, ranks in _placed(plan):
            np.add.at(loads, list(ranks), self.cost_ms(option))
        return float(loads.max())

    def fits(self, plan: Sequence[TablePlan]) -> bool:
        """Every rank has room for its shards by TorchRec's count."""
        used = np.zeros_like(self._caps)
        for option, ranks in _placed(plan):
            _add(used, self.memory(option), ranks)
        return bool((used <= self._caps).all())


def _placed(plan: Sequence[TablePlan]) -> list[tuple[Option, tuple[int, ...]]]:
    """Every table's option, made from its shards, and their ranks."""
    return [
        (
            Option(
                index,
                table.sharding_type,
                table.compute_kernel,
                tuple(shard.size for shard in table.shards),
                tuple(shard.offset for shard in table.shards),
                module=table.module,
                cache_load_factor=table.cache_load_factor,
            ),
            tuple(table.ranks),
        )
        for index, table in enumerate(plan)
    ]


def _add(used: NDArray[np.float64], memory: Sequence[ShardMemory], ranks: Sequence[int]) -> None:
    for rank, need in zip(ranks, memory, strict=True):
        used[0, rank] += need.hbm_bytes
        used[1, rank] += need.ddr_bytes


SCORED_TOGETHER = 32


class PlannerInputs:
    """What a planner may know: the problem's options, their memory, and costs of shards.

    Args:
        torchrec: count memory as TorchRec does; as shardopt does if None.
    """

    def __init__(self, problem: Problem, torchrec: TorchRecObjective | None = None) -> None:
        self.problem = problem
        space = reduced_space(problem) if torchrec is None else _torchrec_space(problem, torchrec)
        self.objective = Objective(problem, space)
        self.surrogate = Surrogate(self.objective)

    @property
    def options(self) -> Sequence[Sequence[Option]]:
        """Options of every table."""
        return self.objective.space.options


def _torchrec_space(problem: Problem, torchrec: TorchRecObjective) -> Space:
    workload, topology = problem.workload, problem.topology
    space = enumerate_space(workload, topology, problem.hardware.device)
    space = torchrec.with_torchrec_memory(space)
    return drop_uvm(prune(deduplicate(space, topology), topology), topology)


class BaselinePlanner(Protocol):
    """Proposes plans by a rule of its own."""

    name: str

    def propose(self, inputs: PlannerInputs, seed: int, stop: Stop) -> Iterator[Assignment]:
        """Plans worth scoring, which need not fit; ends by itself or once ``stop`` is reached."""
        ...


def find_best_ms(
    planner: BaselinePlanner,
    inputs: PlannerInputs,
    score: Callable[[Sequence[Assignment]], Sequence[float]],
    seed: int,
    stop: Stop,
) -> float | None:
    """Run a planner; the lowest score of its plans that fit, None if none fits.

    Args:
        score: what plans cost, in ms.
    """
    best: float | None = None
    proposals = planner.propose(inputs, seed, stop)
    while proposed := list(islice(proposals, SCORED_TOGETHER)):
        fitting = [plan for plan in proposed if inputs.objective.fits(plan)]
        if fitting:
            least = float(min(score(fitting)))
            best = least if best is None else min(best, least)
    return best


ON_DEVICE = (ComputeKernel.FUSED, ComputeKernel.DENSE)


def list_halvings(options: Sequence[Option]) -> list[Option]:
    """The table whole, then in 2, 4, 8, ... column shards, as far as the space has them.

    A table that may not lie whole on a rank begins with its coarsest split; empty if its
    constraints leave neither.
    """
    found: dict[int, Option] = {}
    for option in options:
        whole = option.sharding_type is ShardingType.TABLE_WISE
        split = option.sharding_type is ShardingType.COLUMN_WISE
        power_of_two = option.num_shards & (option.num_shards - 1) == 0
        if option.compute_kernel in ON_DEVICE and (whole or split) and power_of_two:
            found.setdefault(option.num_shards, option)
    return [found[count] for count in sorted(found)]


def option_of_type(options: Sequence[Option], sharding_type: ShardingType) -> Option | None:
    """The table's option of this type on the device, if it has one."""
    fitting = (
        o for o in options if o.sharding_type is sharding_type and o.compute_kernel in ON_DEVICE
    )
    return next(fitting, None)


def shards_of(chosen: Sequence[Option], costs: Sequence[Array]) -> tuple[Shards, Ints]:
    """All shards of the chosen options, and which of ``chosen`` each belongs to.

    Args:
        costs: of every shard of every option.
    """
    owner = np.repeat(np.arange(len(chosen)), [o.num_shards for o in chosen])
    memory = np.array(
        [(m.hbm_bytes, m.ddr_bytes) for o in chosen for m in o.memory], dtype=np.float64
    ).reshape(-1, 2)
    dims = np.array([size[1] for o in chosen for size in o.sizes], dtype=np.float64)
    return Shards(np.concatenate([np.zeros(0), *costs]), memory, dims), owner


def ranks_of(owner: Ints, ranks: Ints, chosen: Sequence[Option]) -> list[tuple[int, ...]]:
    """Ranks of the shards of each chosen option."""
    return [tuple(ranks[owner == index].tolist()) for index in range(len(chosen))]


GREEDY_SHARE = 0.5
"""Of the plans are placed greedily; the others' shards lie anywhere."""


class RandomPlans:
    """Random options of few sharding types, on random or on greedily chosen ranks."""

    name = "random"

    def propose(self, inputs: PlannerInputs, seed: int, stop: Stop) -> Iterator[Assignment]:
        """Plans until ``stop`` is reached; it must have a time limit."""
        rng = random.Random(seed)
        placer = GreedyPartitioner(inputs.objective, inputs.surrogate)
        while not stop.reached():
            options = _options(inputs, rng)
            if rng.random() < GREEDY_SHARE:
                plan = placer.place_all(options)
            else:
                plan = _anywhere(inputs, options, rng)
            if plan is not None:
                yield plan


def _options(inputs: PlannerInputs, rng: random.Random) -> list[Option]:
    """An option a table; of uniform draws over all options none would be any good, so that the
    sharding types are drawn first."""
    kinds = list(ShardingType)
    allowed = set(rng.sample(kinds, rng.randint(1, len(kinds))))
    return [
        rng.choice([o for o in options if o.sharding_type in allowed] or list(options))
        for options in inputs.options
    ]


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

Splits = tuple[int, ...]
"""How often each table was halved."""


@dataclass(frozen=True)
class _Found:
    cost: float
    plan: Assignment | None


class NeuroShard:
    """See the module."""

    name = "neuroshard"

    def propose(self, inputs: PlannerInputs, seed: int, stop: Stop) -> Iterator[Assignment]:
        """The cheapest plan so far, whenever there is a cheaper one."""
        steps = [list_halvings(options) for options in inputs.options]
        if not all(steps):
            return
        whole: Splits = (0,) * len(steps)
        best = _packed(inputs, _chosen(steps, whole))
        if best.plan is not None:
            yield best.plan
        beam = [(best.cost, whole)]
        for _ in range(MOST_SPLITS):
            tried: dict[Splits, float] = {}
            for _, splits in beam:
                for table in _candidates(inputs, _chosen(steps, splits)):
                    more = (*splits[:table], splits[table] + 1, *splits[table + 1 :])
                    if more in tried or more[table] >= len(steps[table]):
                        continue
                    found = _packed(inputs, _chosen(steps, more))
                    tried[more] = found.cost
                    if found.plan is not None and found.cost < best.cost:
                        best = found
                        yield found.plan
                    if stop.reached():
                        return
            beam = sorted((cost, splits) for splits, cost in tried.items())[:BEAM]


def _chosen(steps: list[list[Option]], splits: Splits) -> list[Option]:
    return [options[at] for options, at in zip(steps, splits, strict=True)]


def _candidates(inputs: PlannerInputs, chosen: list[Option]) -> list[int]:
    """Tables of the largest and of the costliest shards."""
    size = np.array([max(m.hbm_bytes for m in o.memory) for o in chosen])
    cost = np.array([inputs.surrogate.phases(o)[0, [FORWARD, BACKWARD]].sum() for o in chosen])
    both = (np.argsort(-values, kind="stable")[:CANDIDATES] for values in (size, cost))
    return sorted({int(table) for tables in both for table in tables})


def _packed(inputs: PlannerInputs, chosen: list[Option]) -> _Found:
    """The cheapest of the greedy placements: costliest rank's computation and communication."""
    phases = [inputs.surrogate.phases(option) for option in chosen]
    computation = [p[:, [FORWARD, BACKWARD]].sum(axis=1) for p in phases]
    shards, owner = shards_of(chosen, computation)
    world = inputs.problem.topology.world_size
    mean = float(shards.dims.sum()) / world
    tries = place_greedily(shards, inputs.objective.caps.T, (LIMITS * mean).tolist())
    everything = np.concatenate([p.sum(axis=1) for p in phases])
    best = _Found(np.inf, None)
    for ranks in tries:
        if ranks is None:
            continue
        cost = float(np.bincount(ranks, everything, world).max())
        if cost < best.cost:
            places = ranks_of(owner, ranks, chosen)
            best = _Found(cost, tuple(zip(chosen, places, strict=True)))
    return best


PARTS = 4
"""A weight is a multiple of one over this."""


class DreamShardGreedy:
    """See the module."""

    name = "dreamshard-greedy"

    def propose(self, inputs: PlannerInputs, seed: int, stop: Stop) -> Iterator[Assignment]:
        """A plan for every mixture under which the tables fit."""
        chosen = [option_of_type(options, ShardingType.TABLE_WISE) for options in inputs.options]
        whole = [option for option in chosen if option is not None]
        if len(whole) < len(chosen):
            return
        tables = inputs.problem.workload.tables
        costs = np.array([[weight(t) for t in tables] for weight in GREEDY.values()])
        costs /= costs.sum(axis=1, keepdims=True)
        room = inputs.objective.caps.T
        for mixture in _mixtures(len(costs)):
            if stop.reached():
                return
            shards, owner = shards_of(whole, [np.array([c]) for c in np.array(mixture) @ costs])
            (ranks,) = place_greedily(shards, room)
            if ranks is not None:
                yield tuple(zip(whole, ranks_of(owner, ranks, whole), strict=True))


def _mixtures(count: int) -> Iterator[tuple[int, ...]]:
    """Weights that sum to `PARTS`."""
    for weights in itertools.product(range(PARTS + 1), repeat=count):
        if sum(weights) == PARTS:
            yield weights


SPLITS = 20
THRESHOLDS_BYTES = (0, 10**5, 10**6, 10**7, 10**8)
"""Tables of at most this size are data-parallel; submissions use 0 to some hundred MB."""
NVLINK_RATIO, NIC_RATIO = 7.4, 67.0
"""``mem_comm_bw_ratio`` of the submissions: HBM of 3.35 TB/s over NVLink's 450 GB/s, or over a
NIC's 50 GB/s where there are several hosts."""
WORK_RATIO = 4
"""``mem_comm_work_ratio``: bytes a weight is read and written for one that is sent."""


class HugeCtr:
    """See the module."""

    name = "hugectr"

    def propose(self, inputs: PlannerInputs, seed: int, stop: Stop) -> Iterator[Assignment]:
        """A plan after each split, for every threshold and both ways of splitting."""
        for threshold, by_rows in itertools.product(THRESHOLDS_BYTES, (False, True)):
            ladders = [
                _ladder(inputs.problem.workload.tables[t], options, threshold, by_rows)
                for t, options in enumerate(inputs.options)
            ]
            if not all(ladders):
                continue
            at = [0] * len(ladders)
            for _ in range(SPLITS + 1):
                if stop.reached():
                    return
                chosen = [ladder[i] for ladder, i in zip(ladders, at, strict=True)]
                plan = _assigned(inputs, chosen)
                if plan is not None:
                    yield plan
                heat = [
                    _cost(inputs, o) if i + 1 < len(ladder) else -1.0
                    for o, ladder, i in zip(chosen, ladders, at, strict=True)
                ]
                hottest = int(np.argmax(heat))
                if heat[hottest] < 0:
                    break
                at[hottest] += 1


def _ladder(table: Table, options: Sequence[Option], threshold: int, rows: bool) -> list[Option]:
    """A table's options, each a finer split than the one before."""
    replica = option_of_type(options, ShardingType.DATA_PARALLEL)
    if table.weight_bytes <= threshold and replica is not None:
        return [replica]
    columns = list_halvings(options)
    by_row = option_of_type(options, ShardingType.ROW_WISE)
    ladder = columns[:1] if rows else columns
    return [*ladder, by_row] if by_row is not None else ladder


def _cost(inputs: PlannerInputs, option: Option) -> float:
    """Of each shard: columns times ids read and embeddings sent."""
    table = inputs.problem.workload.tables[option.table]
    topology = inputs.problem.topology
    ratio = NVLINK_RATIO if topology.hosts == 1 else NIC_RATIO
    share = topology.world_size if option.sharding_type is ShardingType.ROW_WISE else 1
    sent = ratio / WORK_RATIO * len(table.features)
    return option.column_width * (table.lookups_per_sample / share + sent)


def _assigned(inputs: PlannerInputs, chosen: Sequence[Option]) -> Assignment | None:
    everyone = tuple(range(inputs.problem.topology.world_size))
    placed: dict[int, Choice] = {}
    room: Array = inputs.objective.caps.T.copy()
    free: list[Option] = []
    for option in chosen:
        if option.num_shards == len(everyone) and option.sharding_type in (
            ShardingType.ROW_WISE,
            ShardingType.DATA_PARALLEL,
        ):
            placed[option.table] = (option, everyone)
            room -= inputs.objective.footprint(option, everyone).T
        else:
            free.append(option)
    shards, owner = shards_of(free, [np.full(o.num_shards, _cost(inputs, o)) for o in free])
    (ranks,) = place_greedily(shards, room)
    if ranks is None or (room < 0).any():
        return None
    for option, where in zip(free, ranks_of(owner, ranks, free), strict=True):
        placed[option.table] = (option, where)
    return tuple(placed[table] for table in range(len(inputs.options)))
