"""The plans of a task: simple ones of every structure, the searched ones, and their neighbours.

Ten to a dozen, no two the same up to a renaming of ranks. `MIN_CLOSE` are predicted within `CLOSE`
of the best, where there are so many: telling those apart is what a prediction is good for.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import combinations

from lab.tasks.models import pick, whole
from predictor.errors import InputError
from predictor.hardware.schema import HardwareProfile
from predictor.iteration.plan_scorer import PlanScorer
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.plan_check import (
    RuntimeSetting,
    find_runtime_problem,
    in_torchrec_order,
    row_blocks,
)
from predictor.model.topology import Topology
from predictor.model.workload import Table, Workload
from predictor.predict import Prediction, predict
from search.problem import Problem
from search.solve import solve
from search.space.enumerate import enumerate_space
from search.space.option import Option
from search.stop import Stop

SMALL_BYTES = 2 * 2**20
"""Tables up to it are replicated by the plans that replicate small ones."""

Candidate = tuple[TablePlan, ...]
"""A sharding of every table, in the workload's order."""


def plan_of(workload: Workload, topology: Topology, candidate: Candidate) -> ShardingPlan:
    """The shardings of all tables as a plan."""
    tables = dict(zip(workload.keys, candidate, strict=True))
    return ShardingPlan(tables, topology.world_size, topology.local_world_size)


def structures(workload: Workload, topology: Topology, rng: random.Random) -> dict[str, Candidate]:
    """Name -> plan that needs no search; all of the same workload, some may be equal."""
    tables, world = workload.tables, topology.world_size
    lookups = [t.lookups_per_sample * t.embedding_dim for t in tables]
    by_lookups = greedy(lookups, world)
    plans = {
        "table_wise_by_lookups": _table_wise(tables, by_lookups),
        "table_wise_by_bytes": _table_wise(tables, greedy([t.weight_bytes for t in tables], world)),
        "table_wise_round_robin": _table_wise(tables, [i % world for i in range(len(tables))]),
        "table_wise_random": _table_wise(tables, [rng.randrange(world) for _ in tables]),
        "column_wise": tuple(column_wise(t, world) for t in tables),
        "row_wise": tuple(row_wise(t, world) for t in tables),
    }
    local = topology.local_world_size
    if local > 1:
        hosts = greedy(lookups, topology.hosts)
        # an EmbeddingCollection has no such type, but the same shards
        kinds = {True: ShardingType.TABLE_COLUMN_WISE, False: ShardingType.COLUMN_WISE}
        plans["table_column_wise"] = tuple(
            column_wise(t, local, kinds[t.is_pooled], hosts[i] * local)
            for i, t in enumerate(tables)
        )
    return plans | _mixes(tables, lookups, world)


def _mixes(tables: Sequence[Table], lookups: Sequence[float], world: int) -> dict[str, Candidate]:
    """Plans of several sharding types; whole tables are placed by lookups."""
    by_size = sorted(range(len(tables)), key=lambda i: (tables[i].weight_bytes, i))
    small = {i for i in by_size if tables[i].weight_bytes <= SMALL_BYTES} or {by_size[0]}
    large = set(by_size[-(len(tables) // 3) :])
    rest = sorted(set(by_size) - large, key=lambda i: (-tables[i].embedding_dim, i))
    wide = set(rest[: len(rest) // 2])

    def mix(
        rows: AbstractSet[int] = frozenset(), columns: AbstractSet[int] = frozenset()
    ) -> Candidate:
        return _mix(tables, lookups, world, rows, columns)

    def with_copies(plan: Candidate) -> Candidate:
        copies = (data_parallel(t, world) if i in small else plan[i] for i, t in enumerate(tables))
        return tuple(copies)

    return {
        "small_data_parallel": with_copies(mix()),
        "mix_table_row_column": mix(rows=large, columns=wide),
        "mix_data_table_row": with_copies(mix(rows=large)),
    }


def _mix(
    tables: Sequence[Table],
    lookups: Sequence[float],
    world: int,
    rows: AbstractSet[int],
    columns: AbstractSet[int],
) -> Candidate:
    """Some tables split by rows, some by columns; the others whole, placed by lookups."""
    split = rows | columns
    ranks = greedy([0.0 if i in split else w for i, w in enumerate(lookups)], world)
    found = []
    for i, table in enumerate(tables):
        if i in rows:
            found.append(row_wise(table, world))
        elif i in columns:
            found.append(column_wise(table, world))
        else:
            found.append(table_wise(table, ranks[i]))
    return tuple(found)


def table_wise(table: Table, rank: int) -> TablePlan:
    """The whole table on one rank."""
    shard = Shard(rank, (0, 0), (table.num_embeddings, table.embedding_dim))
    return TablePlan(ShardingType.TABLE_WISE, ComputeKernel.FUSED, (shard,))


def column_wise(
    table: Table,
    ranks: int,
    kind: ShardingType = ShardingType.COLUMN_WISE,
    first: int = 0,
) -> TablePlan:
    """Equal column blocks, one on each of `ranks` ranks from `first`; as many as FBGEMM takes."""
    count = next(n for n in range(ranks, 0, -1) if table.embedding_dim % (4 * n) == 0)
    rows, width = table.num_embeddings, table.embedding_dim // count
    shards = tuple(Shard(first + i, (0, i * width), (rows, width)) for i in range(count))
    return TablePlan(kind, ComputeKernel.FUSED, shards)


def row_wise(table: Table, ranks: int) -> TablePlan:
    """TorchRec's row blocks, one a rank."""
    blocks = enumerate(row_blocks(table.num_embeddings, ranks))
    dim = table.embedding_dim
    shards = tuple(Shard(rank, (start, 0), (size, dim)) for rank, (start, size) in blocks)
    return TablePlan(ShardingType.ROW_WISE, ComputeKernel.FUSED, shards)


def data_parallel(table: Table, ranks: int) -> TablePlan:
    """A copy on every rank."""
    size = (table.num_embeddings, table.embedding_dim)
    shards = tuple(Shard(rank, (0, 0), size) for rank in range(ranks))
    return TablePlan(ShardingType.DATA_PARALLEL, ComputeKernel.DENSE, shards)


def _table_wise(tables: Sequence[Table], ranks: Sequence[int]) -> Candidate:
    return tuple(table_wise(t, rank) for t, rank in zip(tables, ranks, strict=True))


def greedy(weights: Sequence[float], ranks: int) -> list[int]:
    """Rank of each item: the heaviest first, each to the least loaded rank."""
    loads = [0.0] * ranks
    found = [0] * len(weights)
    for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        found[i] = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[found[i]] += weights[i]
    return found


def table_wise_by_skew(
    workload: Workload, topology: Topology, hardware: HardwareProfile
) -> Candidate:
    """Many lookups of few rows on the first ranks, fewer lookups of many rows on the others.

    A lookup costs by ids and, most of all backward, by distinct rows. Of all cuts of the tables in
    the order of distinct rows for each id, this is the one where one half of the ranks is slowest
    forward and the other backward, each by as much as can be.
    """
    tables = workload.tables
    samples = workload.batch_size * topology.world_size
    order = sorted(range(len(tables)), key=lambda i: (distinct_share(tables[i], samples), i))
    plans = [halves(tables, order[:cut], topology.world_size) for cut in range(1, len(order))]
    return max(
        plans,
        key=lambda plan: _crossing_bytes(
            predict(workload, topology, hardware, plan_of(workload, topology, plan))
        ),
    )


def halves(tables: Sequence[Table], first: Collection[int], world: int) -> Candidate:
    """Some tables on the first half of the ranks, the others on the second; by lookups in each."""
    half = max(1, world // 2)
    ranks = [0] * len(tables)
    rest = [i for i in range(len(tables)) if i not in first]
    for part, start, count in ((sorted(first), 0, half), (rest, half, world - half)):
        weights = [tables[i].lookups_per_sample * tables[i].embedding_dim for i in part]
        for i, rank in zip(part, greedy(weights, max(1, count)), strict=True):
            ranks[i] = (start + rank) % world
    return _table_wise(tables, ranks)


def _crossing_bytes(predicted: Prediction) -> float:
    """How much slower the first half of the ranks is forward and the second backward, at least."""
    half = len(predicted.per_rank) // 2
    busy = {
        phase: [max(load.busy_ms.get(phase, 0.0), 1e-9) for load in predicted.per_rank]
        for phase in ("embedding_forward", "embedding_backward")
    }
    forward, backward = busy["embedding_forward"], busy["embedding_backward"]
    if not half:
        return 1.0
    return min(
        max(forward[:half]) / max(forward[half:]), max(backward[half:]) / max(backward[:half])
    )


def distinct_share(table: Table, samples: float) -> float:
    """Distinct rows for each id that a batch of so many samples draws, in (0, 1]."""
    bins = [f.distribution.bins(table.num_embeddings) for f in table.features]
    draws = [samples * f.lookups_per_sample for f in table.features]
    return sum(b.unique(n) for b, n in zip(bins, draws, strict=True)) / sum(draws)


MAX_PLANS = 12
SEARCHED = 2
CLOSE, MIN_CLOSE = 0.10, 4
NEAR_RATIOS = (1.05, 1.02, 1.08)
"""Predicted times of neighbours over that of the best plan, as near as there are any."""
EFFORT = 0.3
SPARE = (
    "table_column_wise",
    "table_wise_random",
    "table_wise_by_bytes",
    "table_wise_round_robin",
)
"""Structures similar to others; every task leaves out some of them, by its seed."""


def task_plans(
    seed: int, workload: Workload, topology: Topology, hardware: HardwareProfile
) -> dict[str, ShardingPlan]:
    """The plans of a task by name, the best predicted first.

    Args:
        seed: of the search, of the random plan, and of which structures are left out.
    """
    predictor = PlanScorer(workload, topology, hardware)
    problem = Problem(workload, topology, hardware)
    result = solve(problem, Stop(effort=EFFORT), seed, top_k=SEARCHED, tolerance=0.0)
    searched = [tuple(r.plan.tables[k] for k in workload.keys) for r in result.plans]
    named = dict(zip(["searched", "searched_2"], searched, strict=False))
    named |= structures(workload, topology, random.Random(f"shardopt plans {seed}"))
    named["table_wise_by_skew"] = table_wise_by_skew(workload, topology, hardware)
    plans = _drop_equal(named)
    times = dict(zip(plans, predictor.score(list(plans.values())).tolist(), strict=True))
    best = min(times, key=lambda name: times[name])
    best_ms = times[best]
    close = {name for name, ms in times.items() if ms <= (1 + CLOSE) * best_ms}
    near = _find_neighbours(predictor, plans[best], best_ms, plans, max(1, MIN_CLOSE - len(close)))
    close |= near.keys()
    left_out = _pick_spare(seed, plans, close, len(plans) + len(near) - MAX_PLANS)
    kept = {name: plan for name, plan in (plans | near).items() if name not in left_out}
    order = sorted(kept, key=lambda name: name != best)
    return {name: plan_of(workload, topology, kept[name]) for name in order}


def _find_neighbours(
    predictor: PlanScorer,
    best: Candidate,
    best_ms: float,
    known: Mapping[str, Candidate],
    count: int,
) -> dict[str, Candidate]:
    """Plans that differ from the best in one or two tables, and little in predicted time."""
    changes = _changes(predictor.workload.tables, best, predictor.topology.world_size)
    times = predictor.score_neighbours(best, changes).tolist()
    seen = {signature(plan) for plan in known.values()}
    found: dict[str, Candidate] = {}
    for ratio in NEAR_RATIOS[:count]:
        order = sorted(range(len(changes)), key=lambda i: (abs(times[i] - ratio * best_ms), i))
        for i in order:
            plan = tuple(changes[i].get(table, had) for table, had in enumerate(best))
            if best_ms <= times[i] <= (1 + CLOSE) * best_ms and signature(plan) not in seen:
                seen.add(signature(plan))
                found[f"near_{len(found) + 1}"] = plan
                break
    return found


def _changes(tables: Sequence[Table], best: Candidate, world: int) -> list[dict[int, TablePlan]]:
    """Every table sharded in another way, and every two whole tables swapped."""
    changes: list[dict[int, TablePlan]] = []
    for i, table in enumerate(tables):
        others = [table_wise(table, rank) for rank in range(world)]
        others += [column_wise(table, world), row_wise(table, world)]
        if table.weight_bytes <= SMALL_BYTES:
            others.append(data_parallel(table, world))
        changes += [{i: other} for other in others if other != best[i]]
    whole = [i for i, p in enumerate(best) if p.sharding_type is ShardingType.TABLE_WISE]
    for i, j in combinations(whole, 2):
        here, there = best[i].ranks[0], best[j].ranks[0]
        if here != there:
            changes.append({i: table_wise(tables[i], there), j: table_wise(tables[j], here)})
    return changes


def _pick_spare(seed: int, plans: Mapping[str, Candidate], close: set[str], count: int) -> set[str]:
    """So many structures that a task can spare; those close to the best last."""
    turn = seed % len(SPARE)
    spare = [name for name in SPARE[turn:] + SPARE[:turn] if name in plans]
    return set(sorted(spare, key=lambda name: name in close)[: max(0, count)])


def _drop_equal(plans: Mapping[str, Candidate]) -> dict[str, Candidate]:
    """The first of every kind of plan."""
    seen: set[object] = set()
    found = {}
    for name, plan in plans.items():
        if signature(plan) not in seen:
            seen.add(signature(plan))
            found[name] = plan
    return found


def signature(plan: Sequence[TablePlan]) -> object:
    """Equal for plans that differ only by a renaming of ranks or of like shards of a table."""
    ranks: dict[int, list[object]] = {}
    for index, table in enumerate(plan):
        for shard in table.shards:
            ranks.setdefault(shard.rank, []).append((index, table.sharding_type.value, shard.size))
    return tuple(sorted(tuple(sorted(held, key=repr)) for held in ranks.values()))


def without_repeats(
    plans: Mapping[str, ShardingPlan], workload: Workload
) -> dict[tuple[str, ...], ShardingPlan]:
    """The plans that differ by more than a renaming of ranks, each with all of its names."""
    found: dict[object, tuple[list[str], ShardingPlan]] = {}
    for name, plan in plans.items():
        key = signature([plan.tables[table] for table in workload.keys])
        found.setdefault(key, ([], plan))[0].append(name)
    return {tuple(names): plan for names, plan in found.values()}


def their_plan(workload: Workload, ranks: Topology, seed: int) -> ShardingPlan:
    """The plan of TorchRec's planner, which looks at embedding modules alone.

    Raises:
        InputError: it finds none that fits.
    """
    from shardopt.training.torchrec_planner import plan_with_torchrec

    found = plan_with_torchrec(workload, ranks, "cpu").plan
    if found is None:
        raise InputError(
            f"TorchRec's planner finds no plan for task {seed} that fits this machine's memory; "
            "measure on one with more, or leave the task out"
        )
    return found


PREFIX = "random_"
"""Of the names of random plans; a number from 1 follows."""
DRAWS = 20
"""Of every plan asked for; where so many give none that is new, there are fewer plans."""


def random_plans(
    seed: int,
    workload: Workload,
    topology: Topology,
    count: int,
    without: Sequence[ShardingPlan] = (),
) -> dict[str, ShardingPlan]:
    """``random_1`` ... and their plans: the same for a seed on any machine, under any profile.

    Each is one of the `structures`, in which a random share of the tables is sharded anew: by an
    option that TorchRec's planner has for it on CPUs, on ranks drawn at random. Tables larger than
    `SMALL_BYTES` are not replicated, as their gradients would be all that an iteration takes.

    Args:
        count: how many; those of a larger count begin with those of a smaller one.
        without: plans that none may equal up to a renaming of ranks.
    """
    rng = random.Random(f"shardopt random plans {seed}")
    bases = list(structures(workload, topology, random.Random(f"shardopt plans {seed}")).values())
    offers = _offers(workload, topology)
    seen = {signature([plan.tables[key] for key in workload.keys]) for plan in without}
    found: dict[str, ShardingPlan] = {}
    for _ in range(DRAWS * count):
        if len(found) == count:
            break
        plan = _draw(rng, pick(rng, bases), offers, topology)
        if signature(plan) not in seen:
            seen.add(signature(plan))
            found[f"{PREFIX}{len(found) + 1}"] = plan_of(workload, topology, plan)
    return found


def _draw(
    rng: random.Random,
    base: Candidate,
    offers: Sequence[Sequence[Option]],
    topology: Topology,
) -> Candidate:
    share = rng.random()
    return tuple(
        _place(rng, pick(rng, options), topology) if rng.random() < share else had
        for had, options in zip(base, offers, strict=True)
    )


def _offers(workload: Workload, topology: Topology) -> list[list[Option]]:
    """What TorchRec's planner has for every table, less copies of large tables."""
    space = enumerate_space(workload, topology, "cpu", extended=False)
    return [
        list(_offered(table, options, topology))
        for table, options in zip(workload.tables, space.options, strict=True)
    ]


def _offered(table: Table, options: Sequence[Option], topology: Topology) -> Iterator[Option]:
    setting = RuntimeSetting(
        (table.num_embeddings, table.embedding_dim),
        table.pooling,
        topology.world_size,
        topology.intra_group_size,
        "cpu",
    )
    for option in options:
        kind = option.sharding_type
        if kind is ShardingType.DATA_PARALLEL and table.weight_bytes > SMALL_BYTES:
            continue
        # one block of columns is the whole table, and an EmbeddingCollection takes it for another
        # width than that of its other tables
        if kind is not ShardingType.TABLE_WISE and option.num_shards == 1:
            continue
        placed = in_torchrec_order(_placed(option, 0, topology))
        if find_runtime_problem(placed, setting) is None:
            yield option


def _place(rng: random.Random, option: Option, topology: Topology) -> TablePlan:
    return _placed(option, whole(rng, 0, topology.world_size - 1), topology)


def _placed(option: Option, first: int, topology: Topology) -> TablePlan:
    """The shards of an option on consecutive ranks; those of TWCW stay on the first one's host."""
    world, local = topology.world_size, topology.local_world_size
    split_by_rank = option.sharding_type in (ShardingType.DATA_PARALLEL, ShardingType.ROW_WISE)
    host = first // local * local

    def rank(index: int) -> int:
        if split_by_rank:
            return index
        if option.sharding_type is ShardingType.TABLE_COLUMN_WISE:
            return host + (first - host + index) % local
        return (first + index) % world

    shards = tuple(
        Shard(rank(i), offset, size)
        for i, (offset, size) in enumerate(zip(option.offsets, option.sizes, strict=True))
    )
    return TablePlan(option.sharding_type, option.compute_kernel, shards)
