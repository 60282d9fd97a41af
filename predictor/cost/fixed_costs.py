"""Costs that are the same under every plan, computed once per workload, topology and profile.

`predictor/hardware/runtimes/torchrec.yaml` holds TorchRec's work on the host, stage by stage, with
its source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from predictor.cost.collectives import Collectives
from predictor.cost.dense import DenseWork, Execution, measured_work, optimizer_ms, price
from predictor.cost.errors import CostErrors
from predictor.cost.ops.op_time import OpTimes
from predictor.cost.uneven_batches import sample_lengths, sequences
from predictor.hardware.loader import load_runtime
from predictor.hardware.schema import HardwareProfile
from predictor.model.captured import CapturedDense
from predictor.model.dense_settings import LengthShares
from predictor.model.dlrm_program import dense_program
from predictor.model.topology import Topology
from predictor.model.workload import Feature, MeasuredDense, Workload
from predictor.units import us

HOST_OPS: Mapping[str, float] = load_runtime("torchrec")["host_ops"]
"""Stage of an iteration -> framework ops, in units of the profile's time of one op."""

Array = NDArray[np.float64]


@dataclass(eq=False)
class FixedCosts:
    """Workload, topology and hardware with the costs that do not depend on the plan.

    Args:
        errors: one draw of the costs' errors, which a graph's costs have; None for none. The costs
            given here are without them.
    """

    workload: Workload
    topology: Topology
    hardware: HardwareProfile
    errors: CostErrors | None = None

    @cached_property
    def collectives(self) -> Collectives:
        """Collectives among the ranks that a plan covers."""
        return Collectives(self.hardware, self.topology)

    @cached_property
    def all_ranks(self) -> Collectives:
        """Collectives among all ranks of the job."""
        job = self.topology.job
        return self.collectives if job is None else Collectives(self.hardware, job)

    @cached_property
    def copies(self) -> Collectives:
        """Collectives among the ranks that hold the same shards."""
        groups = self.workload.replica_groups
        assert groups is not None
        return Collectives(self.hardware, groups.replica_group(self.topology.whole))

    @property
    def all_collectives(self) -> list[Collectives]:
        """All collectives that a graph may use."""
        copied = self.workload.replica_groups is not None and self.topology.job is not None
        return [self.collectives, self.all_ranks, *([self.copies] if copied else [])]

    @cached_property
    def dense(self) -> DenseWork:
        workload = self.workload
        same: tuple[object, ...] = (id(workload),)
        if isinstance(workload.dense, CapturedDense):
            ids = tuple(workload.ids_per_sample.items())
            sizes = workload.batch_size, workload.modules, workload.position_weights
            same = workload.dense, *sizes, ids
        return _work_of(_SameDense((id(self.hardware), *same), self))

    @cached_property
    def uneven(self) -> float:
        """Share by which the dense part of the longest batch outlasts that of the mean batch."""
        lengths = sample_lengths(self.workload)
        if lengths is None:
            return 0.0
        shares, ranks = self._length_shares, self.topology.whole.world_size
        return lengths.excess(shares.linear, shares.square, self.workload.batch_size, ranks)

    @property
    def _length_shares(self) -> LengthShares:
        """Given shares, or those that the ops imply on samples that are a little longer."""
        dense = self.workload.dense
        if dense.length_shares is not None or isinstance(dense, MeasuredDense):
            return dense.length_shares or LengthShares()
        longer = replace(self, workload=_with_longer_samples(self.workload))
        now, then = self.dense.segments_ms, longer.dense.segments_ms
        return LengthShares(linear=max(0.0, then / now - 1) / LONGER if now else 0.0)

    def _dense(self) -> DenseWork:
        dense, modules = self.workload.dense, self.workload.modules
        if isinstance(dense, MeasuredDense):
            return measured_work(dense.at_batch_size(self.workload.batch_size), modules)
        times = OpTimes(self.hardware, dense.data_type)
        runtime = Execution(self._op_ms, dense.compiled, dense.cuda_graphs, dense.bucket_cap_mb)
        return price(dense_program(self.workload), modules, times, runtime)

    def _op_ms(self, kernels: int, views: int, casts: int) -> float:
        ops = HOST_OPS["op"] * kernels + HOST_OPS["view"] * views
        if not self.hardware.inline:
            ops += HOST_OPS["cast"] * casts
        return self.layer_host_ms(ops, kernels)

    def pipeline_host_ms(self) -> float:
        """Return the host time in ms of an iteration outside its stages, pipeline included."""
        cost, hw = self.hardware.overheads, self.hardware
        if hw.inline:
            return us(cost.iteration_us)
        ahead = self.workload.train_pipeline != "base"
        return us(cost.iteration_us + cost.batch_us) + ahead * self.host_ms(HOST_OPS["pipeline"])

    def optimizer_ms(self, parameters: ArrayLike) -> Array:
        """Return the time in ms of a dense optimizer step over table elements, in their shape."""
        return optimizer_ms(self.hardware, self.workload.dense.optimizer, parameters)

    def step_host_ms(self, parameters: int, kernels: int) -> float:
        """Return the host time in ms of a dense optimizer step over ``parameters`` tensors."""
        each = self.hardware.overheads.step_us.get(self.workload.dense.optimizer)
        if each is not None:
            return us(each * parameters)
        return self.layer_host_ms(
            HOST_OPS["step"] + HOST_OPS["step_per_parameter"] * parameters, kernels
        )

    def host_ms(self, ops: float, kernels: int = 0, collectives: int = 0) -> float:
        """Return the host time in ms of framework ops, kernel launches and collective launches."""
        cost = self.hardware.overheads
        return us(ops * cost.op_us + kernels * cost.launch_us + collectives * cost.collective_us)

    def layer_host_ms(self, ops: float, kernels: int) -> float:
        """Return the host time in ms of ops of the dense part and of their launches."""
        cost = self.hardware.overheads
        each = cost.op_us if cost.layer_op_us is None else cost.layer_op_us
        return us(ops * each + kernels * cost.launch_us)


LONGER = 0.05
"""Share by which samples are lengthened to measure how the dense part grows."""


def _with_longer_samples(workload: Workload) -> Workload:
    names = {feature.name for feature in sequences(workload)}

    def longer(feature: Feature) -> Feature:
        more = 1.0 + LONGER * (feature.name in names)
        return replace(feature, pooling_factor=feature.pooling_factor * more)

    tables = (replace(t, features=tuple(map(longer, t.features))) for t in workload.tables)
    return replace(workload, tables=tuple(tables))


@dataclass(frozen=True)
class _SameDense:
    """Cache key of a priced dense part, which a search asks for again in every problem it makes.

    Workloads whose tables or exchanges differ share a captured part, which has a thousand ops.

    Args:
        same: profile and workload, which are large, by their identity; in place of the workload, a
            captured part and its sizes.
    """

    same: tuple[object, ...]
    costs: FixedCosts = field(compare=False)


@lru_cache(maxsize=16)
def _work_of(key: _SameDense) -> DenseWork:
    return key.costs._dense()
