"""TorchRec's greedy placement of chosen options on ranks, for the baseline.

Re-derived from `GreedyPerfPartitioner` in planner/partitioners.py with its default order, by
storage: what is bound to all ranks first, then the largest table first, each shard to the rank
with the least cost so far that has room.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from predictor.model.plan import ShardingType
from predictor.model.topology import Topology
from search.baselines.greedy import Key, NoRoomError, place_shards
from search.baselines.torchrec_cost import Perf
from search.space.option import Option, Partition


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
    total: float = field(init=False)
    sum_hbm: int = field(init=False)
    sum_ddr: int = field(init=False)
    count: int = field(init=False)
    uniform: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", self.perf.total)
        object.__setattr__(self, "sum_hbm", sum(self.hbm))
        object.__setattr__(self, "sum_ddr", sum(self.ddr))
        object.__setattr__(self, "count", len(self.hbm))
        object.__setattr__(self, "uniform", self.option.partition is Partition.UNIFORM)


OptionShard = tuple[CostedOption, int]
"""A shard by its position among those of an option."""


class RankState:
    """Room left and cost so far on every rank."""

    def __init__(self, topology: Topology) -> None:
        self.hbm = list(topology.hbm_cap_bytes)
        self.ddr = list(topology.ddr_cap_bytes)
        self.local = topology.local_world_size
        self.perf = [Perf(0.0, 0.0, 0.0, 0.0)] * topology.world_size
        self.total = [0.0] * topology.world_size

    def fits(self, one: OptionShard, rank: int) -> bool:
        """The shard has room on the rank."""
        choice, shard = one
        return choice.hbm[shard] <= self.hbm[rank] and choice.ddr[shard] <= self.ddr[rank]

    def put(self, one: OptionShard, rank: int) -> None:
        """Place a shard. Parts of the cost are summed one by one, as TorchRec does."""
        choice, shard = one
        self.hbm[rank] -= choice.hbm[shard]
        self.ddr[rank] -= choice.ddr[shard]
        a, b = self.perf[rank], choice.perf
        perf = Perf(a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3])
        self.perf[rank] = perf
        self.total[rank] = perf[0] + perf[2] + perf[1] + perf[3]

    def key(self, rank: int) -> Key:
        """Ranks of the least cost first; ties go round the hosts."""
        return self.total[rank], rank % self.local, rank

    def put_all(self, choice: CostedOption, ranks: Sequence[int], first: int = 0) -> None:
        """Shard ``first + i`` on ``ranks[i]``, or `NoRoomError` with nothing placed."""
        done: list[tuple[int, Perf, float]] = []
        for shard, rank in enumerate(ranks, start=first):
            if not self.fits((choice, shard), rank):
                for back, (there, perf, total) in reversed(list(enumerate(done, start=first))):
                    self.hbm[there] += choice.hbm[back]
                    self.ddr[there] += choice.ddr[back]
                    self.perf[there], self.total[there] = perf, total
                raise NoRoomError
            done.append((rank, self.perf[rank], self.total[rank]))
            self.put((choice, shard), rank)


def partition(choices: Sequence[CostedOption], topology: Topology) -> list[tuple[int, ...]]:
    """Ranks of every shard of every choice; raises `NoRoomError`."""
    ranks = RankState(topology)
    placed: list[tuple[int, ...]] = [()] * len(choices)
    everyone = tuple(range(topology.world_size))
    for i, choice in enumerate(choices):
        if choice.uniform:
            ranks.put_all(choice, everyone)
            placed[i] = everyone
    rest = [i for i, choice in enumerate(choices) if not choice.uniform]
    rest.sort(key=lambda i: (choices[i].sum_hbm, choices[i].sum_ddr), reverse=True)
    heap: list[Key] | None = None
    for i in rest:
        choice = choices[i]
        if choice.option.partition is Partition.DEVICE:
            if heap is None:
                heap = [ranks.key(r) for r in everyone]
                heapq.heapify(heap)
            placed[i] = _by_device(choice, ranks, heap)
        else:
            heap = None
            by_group = choice.option.partition is Partition.HOST
            placed[i] = (_by_host if by_group else _by_hosts)(choice, ranks, topology)
    return placed


def _by_device(choice: CostedOption, ranks: RankState, heap: list[Key]) -> tuple[int, ...]:
    """`_device_partition`: every shard to the cheapest rank that has room."""
    return tuple(place_shards(((choice, shard) for shard in range(choice.count)), ranks, heap))


def _hosts_by_cost(ranks: RankState, topology: Topology) -> list[range]:
    """`_sort_devices_by_perf`: intra groups, the cheapest first."""
    size = topology.intra_group_size
    hosts = [range(g * size, (g + 1) * size) for g in range(topology.groups)]
    return sorted(hosts, key=lambda host: _plain_sum(ranks.total[r] for r in host))


def _plain_sum(values: Iterable[float]) -> float:
    """Added one by one: `sum` compensates rounding from Python 3.12 on, and ties are exact here."""
    total = 0.0
    for value in values:
        total += value
    return total


def _by_host(choice: CostedOption, ranks: RankState, topology: Topology) -> tuple[int, ...]:
    """`_cohost_partition`: all shards within the cheapest group that has room."""
    for host in _hosts_by_cost(ranks, topology):
        room_hbm = sum(ranks.hbm[r] for r in host)
        room_ddr = sum(ranks.ddr[r] for r in host)
        if choice.sum_hbm > room_hbm or choice.sum_ddr > room_ddr:
            continue
        saved = (ranks.hbm[:], ranks.ddr[:], ranks.perf[:], ranks.total[:])
        try:
            if choice.option.sharding_type is ShardingType.TABLE_ROW_WISE:
                ranks.put_all(choice, host)
                return tuple(host)
            heap = [ranks.key(r) for r in host]
            heapq.heapify(heap)
            return _by_device(choice, ranks, heap)
        except NoRoomError:
            ranks.hbm, ranks.ddr, ranks.perf, ranks.total = saved
    raise NoRoomError


def _by_hosts(choice: CostedOption, ranks: RankState, topology: Topology) -> tuple[int, ...]:
    """`_multi_hosts_partition`: a run of groups in order of cost, round robin if too few."""
    hosts = _hosts_by_cost(ranks, topology)
    blocks = choice.count // topology.intra_group_size
    starts = range(1) if blocks >= len(hosts) else range(len(hosts) - blocks + 1)
    for start in starts:
        run = [r for b in range(blocks) for r in hosts[(start + b) % len(hosts)]]
        try:
            ranks.put_all(choice, run)
            return tuple(run)
        except NoRoomError:
            continue
    raise NoRoomError
