"""TorchRec's default planner as a baseline: its options, its costs, its proposals, its placement.

Re-derived from `EmbeddingShardingPlanner.plan` (planner/planners.py), the proposers in
planner/proposers.py (`GridSearchProposer`, `GreedyProposer` twice, `UniformProposer`) and
`NoopPerfModel` (planner/perf_models.py: the largest sum of shard costs on a rank). A test holds it
against the real planner.

TorchRec places every proposal, thousands of them. Here a proposal whose bound already says that
it cannot win, or cannot fit, is not placed; the proposers ignore feedback, so this changes nothing.

TorchRec's own cost of a shard, for the baseline that searches as TorchRec does.

Re-derived from the evaluators in planner/estimator/estimator.py (`TableWiseEvaluator`,
`RowWiseEvaluator`, `TableRowWiseEvaluator`, `DataParallelEvaluator`) with the constants of
planner/constants.py. It is *not* shardopt's prediction; docs/model.md has that.

The order of multiplications is TorchRec's: its partitioner breaks ties on exact floats.

TorchRec's greedy placement of chosen options on ranks, for the baseline.

Re-derived from `GreedyPerfPartitioner` in planner/partitioners.py with its default order, by
storage: what is bound to all ranks first, then the largest table first, each shard to the rank
with the least cost so far that has room.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from predictor.errors import InfeasibleError
from predictor.model.memory.caches import DEFAULT_CACHE_LOAD_FACTOR
from predictor.model.plan import ComputeKernel, ShardingType, TablePlan
from predictor.model.topology import Topology
from predictor.model.workload import DATA_TYPE_BYTES, Table, Workload
from predictor.units import GIB
from search.baselines.torchrec_memory import torchrec_memory
from search.space.enumerate import enumerate_space
from search.space.option import Option, Partition, place


@dataclass(frozen=True)
class CostedOption:
    """An option with what TorchRec thinks it costs.

    Args:
        perf: of each of its shards.
        hbm: bytes of every shard; ``ddr`` likewise.
        order: position in TorchRec's enumeration, within the table.
    """

    option: Option
    perf: Perf
    hbm: tuple[int, ...]
    ddr: tuple[int, ...]
    order: int

    @cached_property
    def total(self) -> float:
        """Cost of a shard in ms."""
        return self.perf.total

    @cached_property
    def sum_hbm(self) -> int:
        """Bytes of HBM that all shards take."""
        return sum(self.hbm)

    @cached_property
    def sum_ddr(self) -> int:
        """Bytes of host memory, likewise."""
        return sum(self.ddr)

    @property
    def count(self) -> int:
        """Number of shards."""
        return len(self.hbm)

    @cached_property
    def uniform(self) -> bool:
        """Every rank has a shard."""
        return self.option.partition is Partition.UNIFORM

    @cached_property
    def smallest(self) -> tuple[int, int]:
        """Least bytes of HBM and of host memory of a shard."""
        return min(self.hbm), min(self.ddr)

    @cached_property
    def largest(self) -> tuple[int, int]:
        """Most bytes of HBM and of host memory of a shard."""
        return max(self.hbm), max(self.ddr)

    @cached_property
    def shard_bytes(self) -> NDArray[np.int64]:
        """Bytes of every shard, ``[hbm or ddr, shards]``."""
        return np.array([self.hbm, self.ddr])


Key = tuple[float, int, int]
"""What ranks are ordered by: cost, what breaks ties, and the rank itself."""


class NoRoomError(Exception):
    """A shard fits on none of the ranks."""


class RankState:
    """Room left and cost so far on every rank."""

    def __init__(self, topology: Topology) -> None:
        self.hbm = list(topology.hbm_cap_bytes)
        self.ddr = list(topology.ddr_cap_bytes)
        self.local = topology.local_world_size
        self.perf = [Perf(0.0, 0.0, 0.0, 0.0)] * topology.world_size
        self.total = [0.0] * topology.world_size
        self.hosts = [
            range(first, first + topology.intra_group_size)
            for first in range(0, topology.world_size, topology.intra_group_size)
        ]
        self.host_of = [host for host, ranks in enumerate(self.hosts) for _ in ranks]
        self.host_costs = [0.0] * len(self.hosts)
        self.changed_hosts: set[int] = set()

    def put_everywhere(self, choices: Sequence[CostedOption]) -> None:
        """Place choices with a shard on every rank while no rank has anything else, or
        `NoRoomError`: all ranks have the same cost."""
        room = np.array([self.hbm, self.ddr])
        for choice in choices:
            room -= choice.shard_bytes
            self.perf[0] = _added(self.perf[0], choice.perf)
        if (room < 0).any():
            raise NoRoomError
        self.hbm, self.ddr = room.tolist()
        self.perf = [self.perf[0]] * len(self.perf)
        self.total = [_total(self.perf[0])] * len(self.perf)
        self.changed_hosts.update(range(len(self.hosts)))

    def hosts_by_cost(self) -> list[range]:
        """`_sort_devices_by_perf`: intra groups, the cheapest first."""
        for host in self.changed_hosts:
            self.host_costs[host] = _plain_sum(self.total[rank] for rank in self.hosts[host])
        self.changed_hosts.clear()
        order = sorted(range(len(self.hosts)), key=self.host_costs.__getitem__)
        return [self.hosts[host] for host in order]

    def fits(self, choice: CostedOption, shard: int, rank: int) -> bool:
        """The shard has room on the rank."""
        return choice.hbm[shard] <= self.hbm[rank] and choice.ddr[shard] <= self.ddr[rank]

    def put(self, choice: CostedOption, shard: int, rank: int) -> None:
        """Place a shard. Parts of the cost are summed one by one, as TorchRec does."""
        self.hbm[rank] -= choice.hbm[shard]
        self.ddr[rank] -= choice.ddr[shard]
        self.perf[rank] = _added(self.perf[rank], choice.perf)
        self.total[rank] = _total(self.perf[rank])
        self.changed_hosts.add(self.host_of[rank])

    def key(self, rank: int) -> Key:
        """Ranks of the least cost first; ties go round the hosts."""
        return self.total[rank], rank % self.local, rank

    def heap(self, ranks: Iterable[int]) -> list[Key]:
        """Ranks by their keys, as a heap."""
        found = [self.key(rank) for rank in ranks]
        heapq.heapify(found)
        return found

    @contextmanager
    def undone_without_room(self) -> Iterator[None]:
        """Undo the placements made in this context if a shard fits nowhere."""
        saved = self.hbm[:], self.ddr[:], self.perf[:], self.total[:]
        try:
            yield
        except NoRoomError:
            self.hbm, self.ddr, self.perf, self.total = saved
            self.changed_hosts.update(range(len(self.hosts)))
            raise

    def put_all(self, choice: CostedOption, ranks: Sequence[int]) -> tuple[int, ...]:
        """Shard ``i`` on ``ranks[i]``, or `NoRoomError` with nothing placed."""
        with self.undone_without_room():
            for shard, rank in enumerate(ranks):
                if not self.fits(choice, shard, rank):
                    raise NoRoomError
                self.put(choice, shard, rank)
        return tuple(ranks)

    def put_on_cheapest(self, choice: CostedOption, heap: list[Key]) -> tuple[int, ...]:
        """`_device_partition`: every shard to the cheapest rank that has room, or `NoRoomError`.

        Args:
            heap: keys of the ranks that may be used, and old keys; kept up to date.
        """
        placed = []
        for shard in range(choice.count):
            full = []
            while heap:
                key = heap[0]
                rank, is_old = key[2], key != self.key(key[2])
                if not is_old and self.fits(choice, shard, rank):
                    break
                heapq.heappop(heap)
                if not is_old:
                    full.append(key)
            if not heap:
                raise NoRoomError
            self.put(choice, shard, rank)
            heapq.heapreplace(heap, self.key(rank))
            for key in full:
                heapq.heappush(heap, key)
            placed.append(rank)
        return tuple(placed)


def partition(choices: Sequence[CostedOption], topology: Topology) -> list[tuple[int, ...]]:
    """Ranks of every shard of every choice; raises `NoRoomError`."""
    ranks = RankState(topology)
    placed: list[tuple[int, ...]] = [()] * len(choices)
    everyone = tuple(range(topology.world_size))
    uniform = [i for i, choice in enumerate(choices) if choice.uniform]
    ranks.put_everywhere([choices[i] for i in uniform])
    for i in uniform:
        placed[i] = everyone
    rest = [i for i, choice in enumerate(choices) if not choice.uniform]
    rest.sort(key=lambda i: (choices[i].sum_hbm, choices[i].sum_ddr), reverse=True)
    heap: list[Key] | None = None
    for i in rest:
        choice = choices[i]
        if choice.option.partition is Partition.DEVICE:
            heap = ranks.heap(everyone) if heap is None else heap
            placed[i] = ranks.put_on_cheapest(choice, heap)
        else:
            by_group = choice.option.partition is Partition.HOST
            placed[i] = _by_host(choice, ranks) if by_group else _by_hosts(choice, ranks, topology)
            if heap is not None:
                for rank in placed[i]:
                    heapq.heappush(heap, ranks.key(rank))
    return placed


def _added(a: Perf, b: Perf) -> Perf:
    """Add costs part by part."""
    return Perf(a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3])


def _total(perf: Perf) -> float:
    """Sum the parts of a rank's cost, in TorchRec's order."""
    return perf[0] + perf[2] + perf[1] + perf[3]


def _plain_sum(values: Iterable[float]) -> float:
    """Added one by one: `sum` compensates rounding from Python 3.12 on, and ties are exact here."""
    total = 0.0
    for value in values:
        total += value
    return total


def _by_host(choice: CostedOption, ranks: RankState) -> tuple[int, ...]:
    """`_cohost_partition`: all shards within the cheapest group that has room."""
    for host in ranks.hosts_by_cost():
        room_hbm = sum(ranks.hbm[r] for r in host)
        room_ddr = sum(ranks.ddr[r] for r in host)
        if choice.sum_hbm > room_hbm or choice.sum_ddr > room_ddr:
            continue
        with suppress(NoRoomError), ranks.undone_without_room():
            if choice.option.sharding_type is ShardingType.TABLE_ROW_WISE:
                return ranks.put_all(choice, host)
            return ranks.put_on_cheapest(choice, ranks.heap(host))
    raise NoRoomError


def _by_hosts(choice: CostedOption, ranks: RankState, topology: Topology) -> tuple[int, ...]:
    """`_multi_hosts_partition`: a run of groups in order of cost, round robin if too few."""
    hosts = ranks.hosts_by_cost()
    blocks = choice.count // topology.intra_group_size
    starts = range(1) if blocks >= len(hosts) else range(len(hosts) - blocks + 1)
    for start in starts:
        run = [r for b in range(blocks) for r in hosts[(start + b) % len(hosts)]]
        with suppress(NoRoomError):
            return ranks.put_all(choice, run)
    raise NoRoomError


INDEX_BYTES = 8
MIN_LOOKUP_DIM = 32
FULL_BLOCK, HALF_BLOCK = 128, 64
HALF_PENALTY, QUARTER_PENALTY = 1.15, 1.75
BACKWARD = 2
WEIGHTED_KERNEL = 1.1
BATCHED_COPY = 2.455
DATA_PARALLEL_ELEMENTWISE = 9.22


def _gib_per_s(value: float) -> float:
    """TorchRec writes ``x * 1024 * 1024 * 1024 / 1000``: GiB/s as bytes/ms."""
    return value * GIB / 1000


@dataclass(frozen=True)
class Bandwidths:
    """Bytes/ms, with TorchRec's defaults (planner/constants.py): those of a V100 on any GPU."""

    hbm: float = _gib_per_s(897)
    ddr: float = _gib_per_s(51)
    hbm_to_ddr: float = _gib_per_s(32)
    ssd: float = _gib_per_s(100 / 1024)
    intra_host: float = _gib_per_s(600)
    inter_host: float = _gib_per_s(12.5)


class Perf(NamedTuple):
    """Milliseconds of one shard, the parts of TorchRec's `Perf` that its total sums."""

    fwd_compute: float
    fwd_comms: float
    bwd_compute: float
    bwd_comms: float

    @property
    def total(self) -> float:
        """Their sum, in TorchRec's order."""
        return self.fwd_compute + self.bwd_compute + self.fwd_comms + self.bwd_comms


@dataclass(frozen=True)
class CostModel:
    """Costs of the options of a workload on a topology."""

    workload: Workload
    topology: Topology
    device: str = "cuda"
    bandwidths: Bandwidths = Bandwidths()

    def shard_perf(self, option: Option) -> Perf:
        """Cost of any one shard of the option: TorchRec's does not depend on the rows."""
        perf = self._training_perf(option)
        # `is_inference` of `EmbeddingPerfEstimator`
        return perf if self.workload.training else perf._replace(bwd_compute=0.0, bwd_comms=0.0)

    def _training_perf(self, option: Option) -> Perf:
        table = self.workload.tables[option.table]
        columns = option.column_width
        if option.sharding_type is ShardingType.DATA_PARALLEL:
            return self._data_parallel(table, option.compute_kernel)
        bw = self._kernel_bw(option.compute_kernel, option.cache_load_factor)
        if option.sharding_type is ShardingType.ROW_WISE:
            return self._row_wise(table, columns, bw)
        if option.sharding_type in (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD):
            return self._table_row_wise(table, columns, bw)
        return self._table_wise(table, columns, bw)

    def _ids(self, table: Table) -> float:
        batch = self.workload.batch_size
        return sum(f.pooling_factor * f.num_poolings * batch for f in table.features)

    def _outputs(self, table: Table) -> float:
        if not table.is_pooled:
            return self._ids(table)
        batch = self.workload.batch_size
        return sum(min(1.0, f.pooling_factor) * f.num_poolings * batch for f in table.features)

    def _comm_bytes(self, table: Table, *, backward: bool) -> float:
        """Bytes of an element on the wire: the codec's, or the table's where there is none."""
        qcomm = self.workload.qcomm
        if qcomm.forward == qcomm.backward == "fp32":
            return table.element_bytes
        return DATA_TYPE_BYTES[qcomm.backward if backward else qcomm.forward]

    def _kernel_bw(self, kernel: ComputeKernel, clf: float | None) -> float:
        """`kernel_bw_lookup` in planner/constants.py."""
        memory = self.bandwidths.ddr if self.device == "cpu" else self.bandwidths.hbm
        if kernel is ComputeKernel.DENSE:
            return 0.5 * memory
        if kernel in (ComputeKernel.FUSED, ComputeKernel.DYNAMICEMB):
            return 1 * memory
        if kernel is ComputeKernel.FUSED_UVM:
            return self.bandwidths.hbm_to_ddr / 10
        if kernel.is_stored:
            on_ssd = kernel is ComputeKernel.KEY_VALUE
            return self.bandwidths.ssd if on_ssd else self.bandwidths.hbm_to_ddr
        clf = DEFAULT_CACHE_LOAD_FACTOR if clf is None else clf
        return (clf * self.bandwidths.hbm + (1 - clf) * self.bandwidths.hbm_to_ddr) / 10

    def _wire_bw(self, world: int, local: int) -> float:
        """`BasicCommsBandwidths.get_bw` in planner/types.py, all but the all-reduce."""
        return self.bandwidths.intra_host if world <= local else self.bandwidths.inter_host

    def _compute(self, table: Table, size: float, bw: float) -> tuple[float, float]:
        """Forward and backward time; ``size`` in bytes."""
        forward = size / bw
        backward = forward * BACKWARD
        return forward, backward + (forward * WEIGHTED_KERNEL if table.weighted else 0.0)

    def _input_bytes(self, table: Table, ids: float) -> int:
        return math.ceil(ids * INDEX_BYTES) * (2 if table.weighted else 1)

    def _table_wise(self, table: Table, columns: int, bw: float) -> Perf:
        world, element = self.topology.world_size, table.element_bytes
        ids, outputs = self._ids(table), self._outputs(table)
        size = self._input_bytes(table, ids * world)
        size += ids * world * max(columns, MIN_LOOKUP_DIM) * element  # type: ignore[assignment]
        sent = outputs * world * columns * self._comm_bytes(table, backward=False)
        returned = outputs * world * columns * self._comm_bytes(table, backward=True)
        forward, backward = self._compute(table, (size + sent) * _penalty(columns), bw)
        wire = self._wire_bw(world, self.topology.local_world_size)
        return Perf(forward, sent / wire, backward, returned / wire)

    def _row_wise(self, table: Table, columns: int, bw: float) -> Perf:
        world = self.topology.world_size
        size, sent, returned = self._by_row(table, columns, world)
        forward, backward = self._compute(table, size + sent, bw)
        wire = self._wire_bw(world, self.topology.local_world_size)
        copied = returned * BATCHED_COPY / bw
        return Perf(forward, sent / wire, backward, returned / wire + copied)

    def _by_row(self, table: Table, columns: int, parts: int) -> tuple[float, float, float]:
        """Bytes read, sent forward and sent backward when ``parts`` ranks share the rows."""
        world = self.topology.world_size
        ids, outputs = self._ids(table), self._outputs(table)
        read = self._input_bytes(table, ids / parts * world)
        lookups = ids / parts * world * columns * table.element_bytes
        written = outputs * world if table.is_pooled else outputs / parts * world
        sent = written * columns * self._comm_bytes(table, backward=False)
        returned = written * columns * self._comm_bytes(table, backward=True)
        return read + lookups, sent, returned

    def _table_row_wise(self, table: Table, columns: int, bw: float) -> Perf:
        group, groups = self.topology.intra_group_size, self.topology.groups
        size, sent, returned = self._by_row(table, columns, group)
        forward, backward = self._compute(table, size + sent, bw)
        wire = self._wire_bw(group, min(group, self.topology.local_world_size))
        across, back = 0.0, 0.0
        if groups > 1:
            outputs = self._outputs(table) * groups * columns
            inter = self._wire_bw(groups, 1)
            across = outputs * self._comm_bytes(table, backward=False) / inter
            back = outputs * self._comm_bytes(table, backward=True) / inter
        copied = returned * BATCHED_COPY / bw
        return Perf(forward, sent / wire + across, backward, back + returned / wire + copied)

    def _data_parallel(self, table: Table, kernel: ComputeKernel) -> Perf:
        world, local = self.topology.world_size, self.topology.local_world_size
        bw = self._kernel_bw(kernel, None)
        ids, dim, element = self._ids(table), table.embedding_dim, table.element_bytes
        size = self._input_bytes(table, ids) + ids * dim * element
        forward, backward = self._compute(table, size + self._outputs(table) * dim * element, bw)
        weights = table.num_embeddings * dim * element
        nodes = min(world / local, 2)
        all_reduce = weights * (2 * nodes - 1) / nodes / (self.bandwidths.inter_host * local)
        if world > 2 * local:
            all_reduce *= 2
        return Perf(forward, 0.0, backward, all_reduce + weights * DATA_PARALLEL_ELEMENTWISE / bw)


def _penalty(columns: int) -> float:
    """`compute_block_usage_penalty`: narrow rows leave lanes of the kernel idle."""
    if columns >= FULL_BLOCK:
        return 1.0
    return HALF_PENALTY if columns >= HALF_BLOCK else QUARTER_PENALTY


MAX_GRID = 10_000
"""TorchRec's `MAX_PROPOSALS` of the grid search."""
SLACK = 1e-9
"""Relative error that the bound of a proposal may have from summing in another order."""


@dataclass(frozen=True)
class TorchRecPlan:
    """Answer of TorchRec's planner.

    Args:
        tables: in the workload's order.
        options: the chosen option of every table.
        rating_ms: under TorchRec's own cost model; no iteration time.
        cut_short: not all proposals were looked at.
    """

    tables: tuple[TablePlan, ...]
    options: tuple[Option, ...]
    rating_ms: float
    cut_short: bool = False


def torchrec_plan(
    workload: Workload,
    topology: Topology,
    device: str = "cuda",
    bandwidths: Bandwidths | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> TorchRecPlan | None:
    """The plan of TorchRec's default planner, or None where it finds none.

    Memory is counted as TorchRec counts it, with its default pipeline type: the plan can be larger
    than the caps by shardopt's count. Constraints on ranks, which TorchRec does not know, are not
    honoured; both are for the caller to check.

    Args:
        topology: caps after the reservation.
        bandwidths: TorchRec's defaults if None.
        stop: asked, once a proposal fits, before every other one that has to be placed; the plan
            is then ``cut_short``, and may not be what TorchRec would answer.
    """
    order = _torchrec_order(workload)
    try:
        choices = _choices(workload, topology, device, bandwidths or Bandwidths())
    except InfeasibleError:
        return None  # a table that only our search has an option for
    best = best_proposal([choices[t] for t in order], topology, stop)
    if best.choices is None:
        return None
    chosen = dict(zip(order, zip(best.choices, best.ranks, strict=True), strict=True))
    in_order = [chosen[t] for t in range(len(workload.tables))]
    return TorchRecPlan(
        tuple(place(choice.option, ranks) for choice, ranks in in_order),
        tuple(choice.option for choice, _ in in_order),
        best.rating,
        best.cut_short,
    )


def _torchrec_order(workload: Workload) -> list[int]:
    """The enumerator takes modules from a stack: the last one first."""
    modules = workload.modules[::-1]
    return sorted(
        range(len(workload.tables)), key=lambda t: modules.index(workload.tables[t].module)
    )


def _choices(
    workload: Workload, topology: Topology, device: str, bandwidths: Bandwidths
) -> list[list[CostedOption]]:
    """Every option with TorchRec's cost and storage."""
    base = replace(workload, train_pipeline="base")
    model = CostModel(base, topology, device, bandwidths)
    result = []
    for options in enumerate_space(base, topology, device, extended=False).options:
        table: list[CostedOption] = []
        for order, option in enumerate(options):
            memory = torchrec_memory(
                base.tables[option.table],
                base,
                topology,
                option.sharding_type,
                option.compute_kernel,
                option.sizes,
                option.cache_load_factor,
                device=device,
            )
            hbm = tuple(m.hbm_bytes for m in memory)
            ddr = tuple(m.ddr_bytes for m in memory)
            table.append(CostedOption(option, model.shard_perf(option), hbm, ddr, order))
        result.append(table)
    return result


def best_proposal(
    tables: Sequence[list[CostedOption]],
    topology: Topology,
    stop: Callable[[], bool] = lambda: False,
) -> BestProposal:
    """Run TorchRec's default proposers and its greedy partitioner on costed options.

    Args:
        tables: the options of every table, both in the order of TorchRec's enumeration.
        topology, stop: as of `torchrec_plan`.
    """
    best = BestProposal(topology)
    made = list(tables)
    for proposal in itertools.chain(
        _grid(made), _greedy(made, depth=True), _greedy(made, depth=False), _uniform(made)
    ):
        if best.may_win(proposal):
            best.cut_short = best.choices is not None and stop()
            if best.cut_short:
                break
            best.place(proposal)
    return best


class BestProposal:
    """The best proposal so far, as `EmbeddingShardingPlanner.plan` keeps it; ``choices`` is None
    until one fits."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.rating = math.inf
        self.choices: list[CostedOption] | None = None
        self.ranks: list[tuple[int, ...]] = []
        self.cut_short = False
        self._room = sum(topology.hbm_cap_bytes), sum(topology.ddr_cap_bytes)
        self._largest = max(topology.hbm_cap_bytes), max(topology.ddr_cap_bytes)

    def may_win(self, proposal: _Proposal) -> bool:
        """Return True if the bounds of a proposal leave it a chance."""
        hbm, ddr, bound = proposal.bounds(self.topology.world_size)
        fits = hbm <= self._room[0] and ddr <= self._room[1]
        if not fits or bound * (1 - SLACK) > self.rating:
            return False
        hbm, ddr = proposal.least_on_some_rank()
        return hbm <= self._largest[0] and ddr <= self._largest[1]

    def place(self, proposal: _Proposal) -> None:
        """Place and rate a proposal."""
        choices = list(proposal.choices)
        try:
            ranks = partition(choices, self.topology)
        except NoRoomError:
            return
        rating = _rate(choices, ranks, self.topology.world_size)
        if rating < self.rating:
            self.rating, self.choices, self.ranks = rating, choices, ranks


def _rate(choices: Sequence[CostedOption], ranks: Sequence[tuple[int, ...]], world: int) -> float:
    """`NoopPerfModel.rate`: the largest sum of shard costs on a rank, in ms."""
    load = [0.0] * world
    for choice, where in zip(choices, ranks, strict=True):
        for rank in where:
            load[rank] += choice.total
    return max(load)


class _Proposal:
    """One choice a table; sums are kept as tables change."""

    def __init__(self, choices: Sequence[CostedOption]) -> None:
        self.choices = list(choices)
        self._hbm = sum(c.sum_hbm for c in choices)
        self._ddr = sum(c.sum_ddr for c in choices)
        self._total = np.array([c.total for c in choices])
        self._count = np.array([c.count for c in choices])
        self._uniform = np.array([c.uniform for c in choices])

    def change(self, table: int, choice: CostedOption) -> None:
        """Choose another option for a table."""
        old = self.choices[table]
        self.choices[table] = choice
        self._hbm += choice.sum_hbm - old.sum_hbm
        self._ddr += choice.sum_ddr - old.sum_ddr
        self._total[table] = choice.total
        self._count[table] = choice.count
        self._uniform[table] = choice.uniform

    def bounds(self, world: int) -> tuple[int, int, float]:
        """HBM and DDR it needs in bytes, and a lower bound on its rating in ms.

        No rank is below the mean, and some rank has the costliest shard besides what all have.
        """
        mean = float(self._total @ self._count) / world
        everywhere = float(self._total[self._uniform].sum())
        alone = self._total[~self._uniform]
        largest = float(alone.max()) if alone.size else 0.0
        return self._hbm, self._ddr, max(mean, everywhere + largest)

    def least_on_some_rank(self) -> tuple[int, int]:
        """Bytes of HBM and DDR that some rank needs at least: the largest shard, besides the
        smallest ones of what all ranks have."""
        everywhere = [c.smallest for c in self.choices if c.uniform]
        alone = [c.largest for c in self.choices if not c.uniform]
        hbm, ddr = map(sum, zip((0, 0), *everywhere, strict=True))
        most_hbm, most_ddr = map(max, zip((0, 0), *alone, strict=True))
        return hbm + most_hbm, ddr + most_ddr


def _score(choice: CostedOption, depth: bool) -> float:
    """`_sharding_option_score`: cost of a shard, or of all (summed one by one, as there)."""
    return choice.total if depth else sum([choice.total] * choice.count)


def _grid(tables: list[list[CostedOption]]) -> Iterator[_Proposal]:
    """`GridSearchProposer`: all combinations, if there are few."""
    if math.prod(map(len, tables)) > MAX_GRID:
        return
    ranked = [sorted(table, key=lambda c: _score(c, True)) for table in tables]
    for combination in itertools.product(*ranked):
        yield _Proposal(combination)


def _greedy(tables: list[list[CostedOption]], *, depth: bool) -> Iterator[_Proposal]:
    """`GreedyProposer`: all tables at their cheapest; then, while any has another option, the one
    with the largest storage takes its next."""
    ranked = [sorted(table, key=lambda c: _score(c, depth)) for table in tables]
    proposal = _Proposal([table[0] for table in ranked])
    yield proposal
    heap = [_storage_key(table[0], t) for t, table in enumerate(ranked) if len(table) > 1]
    heapq.heapify(heap)
    at = [0] * len(ranked)
    while heap:
        table = heap[0][-1]
        at[table] += 1
        now = ranked[table][at[table]]
        proposal.change(table, now)
        if at[table] + 1 < len(ranked[table]):
            heapq.heapreplace(heap, _storage_key(now, table))
        else:
            heapq.heappop(heap)
        yield proposal


def _storage_key(choice: CostedOption, table: int) -> tuple[int, int, int, int, int]:
    """Largest storage first, then the first table."""
    return -max(choice.hbm), -choice.sum_hbm, -max(choice.ddr), -choice.sum_ddr, table


def _uniform(tables: list[list[CostedOption]]) -> Iterator[_Proposal]:
    """`UniformProposer`: one sharding type for all tables, each at its cheapest kernel."""
    kinds = dict.fromkeys(c.option.sharding_type for table in tables for c in table)
    for kind in kinds:
        of_kind = [[c for c in table if c.option.sharding_type is kind] for table in tables]
        if all(of_kind):
            yield _Proposal([min(table, key=lambda c: _score(c, True)) for table in of_kind])
