"""What a plan needs on every rank, and what every rank has, in bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from predictor.model.memory.shards import ShardMemory, shard_memory
from predictor.model.plan import ShardingPlan
from predictor.model.topology import Topology
from predictor.model.workload import Workload
from predictor.units import format_bytes


@dataclass(frozen=True)
class RankMemory:
    """What a plan needs on one rank, and what the rank has, in bytes.

    Args:
        hbm_bytes, ddr_bytes: of its shards, with what is in flight between them and the dense part.
        hbm_cap_bytes, ddr_cap_bytes: left for shards.
        peak: what the whole process takes, if it was worked out.
    """

    rank: int
    hbm_bytes: int
    hbm_cap_bytes: int
    ddr_bytes: int
    ddr_cap_bytes: int
    peak: RankPeak | None = None

    @property
    def missing_hbm_bytes(self) -> int:
        """Device memory that is missing; 0 when it fits."""
        if self.peak is not None and self.peak.on_device:
            return self.peak.missing_bytes
        return max(0, self.hbm_bytes - self.hbm_cap_bytes)

    @property
    def missing_ddr_bytes(self) -> int:
        """Host memory that is missing; 0 when it fits."""
        if self.peak is not None and not self.peak.on_device:
            return self.peak.missing_bytes
        return max(0, self.ddr_bytes - self.ddr_cap_bytes)

    @property
    def fits(self) -> bool:
        """Nothing is missing."""
        return not self.missing_hbm_bytes and not self.missing_ddr_bytes

    def use(self, kind: str) -> tuple[int, int]:
        """What is needed and what there is of ``HBM`` or ``DDR``."""
        if self.peak is not None and self.peak.on_device == (kind == "HBM"):
            return self.peak.reserved_bytes, self.peak.limit_bytes
        if kind == "HBM":
            return self.hbm_bytes, self.hbm_cap_bytes
        return self.ddr_bytes, self.ddr_cap_bytes


@dataclass(frozen=True)
class RankPeak:
    """The most that one rank's process takes of its device, or of its host on CPUs, in bytes.

    Args:
        activations_bytes: most of the dense part beside what stays, lookups' outputs included.
        allocated_bytes: of tensors that are there at once.
        reserved_bytes: that the allocator takes for them.
        capacity_bytes: installed.
        limit_bytes: of these, what may be reserved.
        on_device: whether this is device memory.
    """

    activations_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    capacity_bytes: int
    limit_bytes: int
    on_device: bool = True

    @property
    def missing_bytes(self) -> int:
        """Beyond what may be reserved."""
        return max(0, self.reserved_bytes - self.limit_bytes)


def plan_memory(
    workload: Workload, topology: Topology, plan: ShardingPlan, device: str = "cuda"
) -> list[RankMemory]:
    """What the shards of a plan need on every rank, with the caps of ``topology``.

    The caps are what is left after the reservation for everything that is not sharded.
    """
    hbm, ddr = [0] * topology.world_size, [0] * topology.world_size
    for rank, memory in _placed(workload, topology, plan, device):
        hbm[rank] += memory.hbm_bytes
        ddr[rank] += memory.ddr_bytes
    return [
        RankMemory(r, hbm[r], topology.hbm_cap_bytes[r], ddr[r], topology.ddr_cap_bytes[r])
        for r in range(topology.world_size)
    ]


def resident_bytes(
    workload: Workload, topology: Topology, plan: ShardingPlan, device: str = "cuda"
) -> list[int]:
    """Per rank, bytes of its shards that stay, with states, caches and dense gradients: of device
    memory, or of host memory on CPUs."""
    found = [0] * topology.world_size
    for rank, memory in _placed(workload, topology, plan, device):
        total = memory.ddr_bytes if device == "cpu" else memory.hbm_bytes
        found[rank] += total - memory.io_bytes
    return found


def _placed(
    workload: Workload, topology: Topology, plan: ShardingPlan, device: str
) -> Iterator[tuple[int, ShardMemory]]:
    """The rank of every shard with its memory."""
    for key, table in zip(workload.keys, workload.tables, strict=True):
        sharded = plan.tables[key]
        memories = shard_memory(
            table,
            workload,
            topology,
            sharded.sharding_type,
            sharded.compute_kernel,
            [s.size for s in sharded.shards],
            sharded.cache_load_factor,
            device=device,
            enforce_hbm=bool(sharded.parameters.get("enforce_hbm")),
        )
        for shard, memory in zip(sharded.shards, memories, strict=True):
            yield shard.rank, memory


def fits(memory: Sequence[RankMemory]) -> bool:
    """Every rank has what it needs."""
    return all(rank.fits for rank in memory)


def missing(memory: Sequence[RankMemory]) -> str:
    """How many bytes are missing on which rank, worst first; empty when everything fits."""
    lines = []
    worst = sorted(memory, key=lambda r: -(r.missing_hbm_bytes + r.missing_ddr_bytes))
    for rank in worst:
        for kind, short in (("HBM", rank.missing_hbm_bytes), ("DDR", rank.missing_ddr_bytes)):
            if short:
                need, cap = rank.use(kind)
                lines.append(
                    f"rank {rank.rank} misses {short} bytes of {kind} ({format_bytes(short)}): "
                    f"needs {format_bytes(need)}, has {format_bytes(cap)}"
                )
    return "; ".join(lines)
