"""Peak memory of a rank under a plan, and the memory left for shards before planning."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from predictor.errors import InfeasibleError
from predictor.model.dense_settings import DENSE_STATES
from predictor.model.dlrm_program import OpWriter, dense_program
from predictor.model.lookup_group import is_stashed
from predictor.model.memory.blocks import Peak, block_bytes
from predictor.model.memory.iteration import (
    ExchangeMemory,
    Iteration,
    batch_bytes,
    exchanges,
    largest,
    unplaced,
)
from predictor.model.memory.ranks import (
    RankMemory,
    RankPeak,
    resident_bytes,
    shards_memory,
)
from predictor.model.op_calls import DenseProgram, Event, Lookup, LookupBackward, OpCall
from predictor.model.plan import ShardingPlan
from predictor.model.topology import Topology
from predictor.model.workload import MeasuredDense, Workload
from predictor.units import format_bytes

DEFAULT_RESERVE = 0.05
"""Share of a device that stays free where activations are known: for what lies outside PyTorch's
allocator (cuBLAS workspaces, libraries' scratch) and for batches larger than the mean."""
UNKNOWN_RESERVE = 0.15
"""The same where they are not known: TorchRec's share, which includes activations."""
NEARLY_FULL = 0.95
"""Share of the limit on reserved memory above which a plan gets a warning."""


def default_reserve(workload: Workload) -> float:
    """Return the share of a device to keep free where the user gives none."""
    dense = workload.dense
    unknown = isinstance(dense, MeasuredDense) and dense.activation_bytes is None
    return UNKNOWN_RESERVE if unknown else DEFAULT_RESERVE


def memory_of_plan(
    workload: Workload,
    topology: Topology,
    plan: ShardingPlan,
    device: str = "cuda",
    program: DenseProgram | None = None,
) -> list[RankMemory]:
    """Return the memory of a plan on every rank, with the peak of its process.

    Args:
        program: the dense part at the workload's batch size; that of the workload if None.
    """
    return PeakMemory(workload, topology, device, program).of(plan)


class PeakMemory:
    """Peaks of the plans of one workload.

    Args:
        program: the dense part at the workload's batch size; that of the workload if None.
    """

    def __init__(
        self,
        workload: Workload,
        topology: Topology,
        device: str = "cuda",
        program: DenseProgram | None = None,
    ) -> None:
        self.workload, self.topology, self.device = workload, topology, device
        self.program = program or program_of(workload)

    def of(self, plan: ShardingPlan) -> list[RankMemory]:
        """Return the memory of a plan on every rank, with the peak of its process."""
        topology, on_device = self.topology, self.device != "cpu"
        caps = topology.hbm_cap_bytes if on_device else topology.ddr_cap_bytes
        installed, limits = topology.installed_bytes or caps, topology.limit_bytes or caps
        ranks, shards = shards_memory(self.workload, topology, plan, self.device)
        peaks = self.peaks_of(plan, shards, range(len(ranks)))
        return [
            replace(
                memory,
                peak=RankPeak(
                    self._activations,
                    peak.allocated_bytes,
                    peak.reserved_bytes,
                    installed[memory.rank],
                    limits[memory.rank],
                    on_device,
                ),
            )
            for memory, peak in zip(ranks, peaks, strict=True)
        ]

    @cached_property
    def _activations(self) -> int:
        return activation_bytes(self.workload, self.program)

    def peaks(self, plan: ShardingPlan) -> list[Peak]:
        """Return the peak of every rank's process."""
        shards = resident_bytes(self.workload, self.topology, plan, self.device)
        return list(self.peaks_of(plan, shards, range(self.topology.world_size)))

    def peaks_of(
        self, plan: ShardingPlan, shards: Sequence[int], ranks: Iterable[int]
    ) -> Iterator[Peak]:
        """Yield the peaks of some ranks' processes.

        Args:
            shards: resident bytes of each rank's shards.
        """
        of_ranks = exchanges(self.workload, self.topology, plan)
        return self._peaks(plan, shards, ((rank, of_ranks[rank]) for rank in ranks))

    def fit(
        self, plan: ShardingPlan, shards: Sequence[int], ranks: Sequence[int], *, exact: bool
    ) -> bool:
        """Return True if the processes of some ranks fit at their peaks.

        Args:
            shards: resident bytes of each rank's shards.
            exact: simulate each rank. Otherwise all fit if they do with the largest exchanges of
                any of them, rounded up: that is one simulation, which many plans share.
        """
        of_ranks = exchanges(self.workload, self.topology, plan)
        limits = self.topology.limit_bytes

        def all_fit(of_rank: Iterable[tuple[int, Sequence[ExchangeMemory]]]) -> bool:
            peaks = zip(ranks, self._peaks(plan, shards, of_rank), strict=True)
            return all(peak.reserved_bytes <= limits[rank] for rank, peak in peaks)

        if not exact:
            most = largest([of_ranks[rank] for rank in ranks])
            if all_fit((rank, most) for rank in ranks):
                return True
        return all_fit((rank, of_ranks[rank]) for rank in ranks)

    def _peaks(
        self,
        plan: ShardingPlan,
        shards: Sequence[int],
        of_ranks: Iterable[tuple[int, Sequence[ExchangeMemory]]],
    ) -> Iterator[Peak]:
        """Yield the peaks of ranks with these exchanges."""
        workload, program, device = self.workload, self.program, self.device
        cached = frozenset(
            table.module
            for key, table in zip(workload.keys, workload.tables, strict=True)
            if plan.tables[key].compute_kernel.is_cached
        )
        fixed = dense_bytes(program, trains=workload.training)
        weights = _stashed_weights(workload, self.topology, plan, device)
        states = program.state_bytes if workload.stash_optimizer_state and device != "cpu" else 0
        for rank, of_rank in of_ranks:
            stashed = weights[rank], states
            peak = simulated_peak(workload, program, of_rank, device, cached, stashed)
            stays = fixed + shards[rank] - sum(stashed)
            yield Peak(peak.allocated_bytes + stays, peak.reserved_bytes + stays)


def simulated_peak(
    workload: Workload,
    program: DenseProgram,
    of_rank: Sequence[ExchangeMemory],
    device: str,
    cached: frozenset[str] = frozenset(),
    stashed: tuple[int, int] = (0, 0),
) -> Peak:
    """Return the peak of `Iteration`; ranks that are equal in it are simulated once.

    They may be those of several plans and of workloads that differ elsewhere, as two settings of a
    model do.
    """
    key = (
        id(program),
        workload.train_pipeline,
        workload.training,
        batch_bytes(workload),
        device,
        cached,
        stashed,
        *of_rank,
    )
    return _peak(_Inputs(key, (workload, program, of_rank, device, cached, stashed)))


@dataclass(frozen=True)
class _Inputs:
    """Cache key of a simulation.

    Args:
        same: all that the simulation depends on; the program by its identity.
        given: arguments of `Iteration`.
    """

    same: tuple[Hashable, ...]
    given: tuple[Any, ...] = field(compare=False)


@lru_cache(maxsize=1 << 12)
def _peak(inputs: _Inputs) -> Peak:
    return Iteration(*inputs.given).run()


def _stashed_weights(
    workload: Workload, topology: Topology, plan: ShardingPlan, device: str
) -> list[int]:
    """Return the bytes of weights stashed off each rank's device."""
    stashed = [0] * topology.world_size
    if device == "cpu":
        return stashed
    for key, table in zip(workload.keys, workload.tables, strict=True):
        if is_stashed(table, plan.tables[key].compute_kernel):
            for shard in plan.tables[key].shards:
                stashed[shard.rank] += shard.size[0] * table.row_bytes(shard.size[1])
    return stashed


def leave_for_shards(
    workload: Workload,
    installed: Topology,
    reserve: float,
    device: str = "cuda",
    context_bytes: int = 0,
) -> Topology:
    """Return the ranks that a plan covers, with the memory left for shards as their caps.

    What a process takes at its peak beside its shards, whichever the plan, goes off, so that no
    plan fits of which a rank's shards add more than what is left (`ShardMemory`). Whether one of
    which they add less does fit, `PeakMemory` says.

    Args:
        installed: all ranks of the job, or already those of one sharding group.
        reserve: share of device memory that stays free.
        context_bytes: of each process on its device, outside PyTorch's allocator.
    """
    if installed.job is None:
        installed = workload.sharding_group(installed)
    least = least_bytes(workload, device)
    if device == "cpu":
        caps = installed.ddr_cap_bytes
        free = tuple(cap - least for cap in caps)
        return replace(installed, ddr_cap_bytes=free, installed_bytes=caps, limit_bytes=caps)
    caps = installed.hbm_cap_bytes
    limits = tuple(int((1 - reserve) * cap) - context_bytes for cap in caps)
    free = tuple(limit - least for limit in limits)
    rank = free.index(min(free))
    if free[rank] < 0:
        raise InfeasibleError(
            f"rank {rank} has {format_bytes(caps[rank])} of HBM; before any table is placed, the "
            f"dense part, the input batch and the reserve of {100 * reserve:g} % need "
            f"{format_bytes(-free[rank], round_up=True)} more; try a smaller batch, a smaller "
            "reserve or more HBM",
            inputs=("batch_size", "reserve", "hbm_gib"),
        )
    return replace(installed, hbm_cap_bytes=free, installed_bytes=caps, limit_bytes=limits)


def limit_processes(workload: Workload, available: Topology, device: str = "cuda") -> Topology:
    """Return the ranks with process limits, where the caps state the memory left for shards."""
    least = least_bytes(workload, device)
    caps = available.ddr_cap_bytes if device == "cpu" else available.hbm_cap_bytes
    return replace(available, limit_bytes=tuple(cap + least for cap in caps))


@lru_cache(maxsize=64)
def least_bytes(workload: Workload, device: str = "cuda") -> int:
    """Return a lower bound on a rank's peak beside its shards, for any plan.

    It counts the dense part, the batches and the modules' outputs, and omits all else that lookups
    take. The weights of all stashed tables count as one block and are subtracted at the end: that
    lowers the peak at least as much as stashing one rank's weights does.
    """
    program, stashed = program_of(workload), (0, 0)
    if device != "cpu":
        weights = sum(table.weight_bytes for table in workload.tables if table.stash_weights)
        states = program.state_bytes if workload.stash_optimizer_state else 0
        stashed = block_bytes(weights) if weights else 0, states
    peak = simulated_peak(workload, program, (), device, stashed=stashed)
    return dense_bytes(program, trains=workload.training) + peak.allocated_bytes - sum(stashed)


def dense_bytes(program: DenseProgram, *, trains: bool = True) -> int:
    """Return the resident bytes of the dense part: parameters and buffers, and where it is trained
    optimizer states and DDP's buckets."""
    parameters = {operand.storage: operand.storage_bytes for operand in program.resident}
    trained = program.state_bytes + program.gradient_bytes
    return sum(parameters.values()) + trained * trains


def activation_bytes(workload: Workload, program: DenseProgram) -> int:
    """Return the peak of the dense part beside resident memory, with outputs of lookups."""
    alone = replace(workload, train_pipeline="base")
    return simulated_peak(alone, program, (), "cpu").allocated_bytes


@lru_cache(maxsize=64)
def program_of(workload: Workload) -> DenseProgram:
    """Return the dense part op by op; measured times get ops for their activations."""
    if isinstance(workload.dense, MeasuredDense):
        return _measured_program(workload, workload.dense)
    return dense_program(workload)


def _measured_program(workload: Workload, dense: MeasuredDense) -> DenseProgram:
    """Return one op that keeps the activations for the backward, and one for the gradients."""
    writer = OpWriter("fp32")
    parameter, take_gradient = writer.parameter(dense.gradient_bytes // 4)
    outputs = {
        module: writer.tensor((round(size / 4),))
        for module, size in ((e.module, e.output) for e in unplaced(workload))
    }
    activations = writer.tensor(((dense.activation_bytes or 0) // 4,))
    lookup_outputs = tuple(outputs.values())
    gradients = tuple(writer.like(output) for output in lookup_outputs)
    numbers = tuple(output.storage for output in lookup_outputs)
    forward: tuple[Event, ...] = (
        *(Lookup(module, (output,)) for module, output in outputs.items()),
        OpCall("measured", lookup_outputs, (activations,), numbers),
    )
    take_gradient(writer.like(parameter))
    backward: tuple[Event, ...] = (
        OpCall("measured_backward", (activations,), gradients, (activations.storage,)),
        *writer.events,
        *(LookupBackward(m, (g,)) for m, g in zip(outputs, gradients, strict=True)),
    )
    states = DENSE_STATES[dense.optimizer] * dense.gradient_bytes
    return DenseProgram(workload.batch_size, forward, backward, (), (parameter,), states)
