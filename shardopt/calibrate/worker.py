"""One rank of a calibration: measures points and reports each row as soon as it is there."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from predictor.model.workload import Workload
from shardopt.calibrate.design.phases import TOGETHER
from shardopt.calibrate.design.points import Point, Size
from shardopt.ranks.hosts import Link
from shardopt.ranks.rank import Rank, Report, join_group, prepare
from shardopt.ranks.realtime import Runtime


@dataclass(frozen=True)
class Job:
    """What the ranks do.

    Args:
        points: of kernels for one rank alone, or of `TOGETHER` for several.
        link: between the ranks, each of which is then a separate host on this machine.
        model: whose lookups some of the points are.
        runtime: of the ranks.
    """

    points: Sequence[Point]
    size: Size
    ranks: int
    backend: str
    link: Link | None = None
    model: Workload | None = None
    runtime: Runtime = Runtime.PLAIN


def measure_points(rank: Rank, report: Report, job: Job) -> None:
    """Measure all points of a job; rank 0 reports every row."""
    device = prepare_quietly(rank, job.backend, job.runtime)
    from shardopt.calibrate.kernels.registry import measure_alone, measure_together

    if job.points and job.points[0].family not in TOGETHER:
        for row in measure_alone(job.points, device, job.size, job.model):
            report(row)
        return
    import torch.distributed as dist

    join_group(rank, job.backend)
    for row in measure_together(job.points, device, job.size, job.runtime):
        if rank.index == 0:
            report(row)
    dist.barrier()


def prepare_quietly(rank: Rank, backend: str, runtime: Runtime) -> Any:
    """As `prepare`, without what libraries log."""
    device = prepare(rank, backend, runtime)
    # newer PyTorch deprecates names that TorchRec still calls, and both log what is no news
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    return device
