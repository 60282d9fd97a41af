"""Peak memory of TorchRec's pipeline benchmark: predicted against what its ranks printed.

Why: docs/decisions/0053.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from lab.validate.report import Cell, Scores
from lab.validate.torchrec_steps.plans import StepPlan
from lab.validate.torchrec_steps.program import benchmark_program
from lab.validate.torchrec_steps.runs import Run
from predictor.hardware.loader import context_bytes, load_hardware
from predictor.model.memory.peak import rank_peaks
from predictor.model.topology import Topology
from predictor.units import GIB


@dataclass(frozen=True)
class RunMemory:
    """The fullest rank of a run, in bytes.

    Args:
        allocated, reserved: predicted peaks.
        capacity: of its GPU, less what lies outside PyTorch's allocator.
    """

    run: Run
    allocated: float
    reserved: float
    capacity: float

    @property
    def errors(self) -> tuple[float, float]:
        """Of allocated and of reserved bytes, signed; NaN where nothing was measured."""
        return (
            _error(self.allocated, self.run.allocated_bytes),
            _error(self.reserved, self.run.reserved_bytes),
        )


def _error(predicted: float, measured: float | None) -> float:
    return math.nan if measured is None else predicted / measured - 1.0


def memory_of(run: Run, plan: StepPlan) -> RunMemory:
    """What the fullest rank of a run is predicted to need."""
    hardware = load_hardware(run.profile)
    topology = Topology.uniform(
        run.ranks, run.ranks, hbm_bytes=hardware.hbm_bytes, ddr_bytes=hardware.ddr_bytes
    )
    program = benchmark_program(run.workload)
    peaks = rank_peaks(run.workload, topology, plan.plan, program, hardware.device)
    capacity = hardware.hbm_bytes - context_bytes(hardware)
    return RunMemory(
        run,
        max(peak.allocated_bytes for peak in peaks),
        max(peak.reserved_bytes for peak in peaks),
        capacity,
    )


def memory_scores(found: Sequence[RunMemory]) -> tuple[Scores, ...]:
    """Mean errors, and every row."""
    measured = [m for m in found if m.run.reserved_bytes is not None]
    if not measured:
        return ()
    means = (
        ("all", len(measured), *_means(measured), sum(m.reserved > m.capacity for m in measured)),
    )
    return (
        Scores(
            "peak memory",
            (
                *(("rows", "text"), ("n", "count"), ("allocated", "share")),
                *(("reserved", "share"), ("predicted not to fit", "count")),
            ),
            means,
            "mean absolute error of the fullest rank; every run did fit",
        ),
        Scores(
            "peak memory of every row, GiB",
            (
                *(("commit", "text"), ("run", "text"), ("allocated", "figure")),
                *(("predicted", "figure"), ("error", "signed"), ("reserved", "figure")),
                *(("predicted reserve", "figure"), ("error of reserve", "signed")),
            ),
            tuple(_row(m) for m in measured),
        ),
    )


def _means(of: Sequence[RunMemory]) -> tuple[float, float]:
    allocated = [abs(m.errors[0]) for m in of if not math.isnan(m.errors[0])]
    reserved = [abs(m.errors[1]) for m in of if not math.isnan(m.errors[1])]
    return fmean(allocated or [math.nan]), fmean(reserved or [math.nan])


def _row(m: RunMemory) -> tuple[Cell, ...]:
    allocated, reserved = m.errors
    return (
        m.run.commit,
        m.run.name,
        _gib(m.run.allocated_bytes),
        m.allocated / GIB,
        allocated,
        _gib(m.run.reserved_bytes),
        m.reserved / GIB,
        reserved,
    )


def _gib(size: float | None) -> float | None:
    return None if size is None else size / GIB
