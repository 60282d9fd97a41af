"""Calibration among ranks that torchrun has started, perhaps on several hosts.

The first rank measures the kernels, keeps the rows and says what is missing; the others wait, and
take part in what needs all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from shardopt.calibrate.design.points import Point
from shardopt.calibrate.rows import CalibrationRows
from shardopt.calibrate.run import CalibrationSettings, Saver, Say, open_rows, points_of
from shardopt.calibrate.worker import prepare_quietly
from shardopt.ranks.rank import Rank, errors_of, join_group

PATIENCE = timedelta(hours=12)
"""That ranks wait for the kernels of the first: a full design takes less than one."""


def measure_joined(settings: CalibrationSettings, join: Rank, say: Say) -> CalibrationRows | None:
    """As `run.measure`, by this process as one of the ranks.

    Returns:
        All rows; None on other ranks than the first.

    Raises:
        InputError: the rows file is of another machine, or corrupt.
        RankDiedError: this rank failed; the rows measured before are in the file.
    """
    file = open_rows(settings, say) if join.index == 0 else None
    with errors_of(join):
        _take_part(settings, join, file, say)
    return file


def _take_part(
    settings: CalibrationSettings, join: Rank, file: CalibrationRows | None, say: Say
) -> None:
    device = prepare_quietly(join, settings.backend)
    import torch.distributed as dist

    join_group(join, settings.backend)
    # gloo waits without working, and NCCL would give up after some minutes
    waiting = dist.new_group(backend="gloo", timeout=PATIENCE)
    missing: list[Any] = [None]
    if file is not None:
        missing = [_measure_alone(settings, file, device, say)]
    dist.broadcast_object_list(missing, src=0, group=waiting)
    _measure_together(settings, file, missing[0], device, say)
    dist.barrier()


def _measure_alone(
    settings: CalibrationSettings, file: CalibrationRows, device: Any, say: Say
) -> list[Point]:
    """Measure the kernels; returns the points that need all ranks and have no rows yet."""
    from shardopt.calibrate.kernels.registry import measure_alone

    kernels, exchanges = points_of(settings)
    missing = [point for point in kernels if not file.has(point)]
    done, total = len(kernels) - len(missing), len(kernels) + len(exchanges)
    saver = Saver(file, settings, done, total, say)
    if missing:
        for row in measure_alone(missing, device, settings.size, settings.model):
            saver.save(row)
    return [point for point in exchanges if not file.has(point)]


def _measure_together(
    settings: CalibrationSettings,
    file: CalibrationRows | None,
    missing: Sequence[Point],
    device: Any,
    say: Say,
) -> None:
    from shardopt.calibrate.kernels.registry import measure_together

    rows = measure_together(missing, device, settings.size, settings.hosts)
    if file is None:
        for _ in rows:
            pass
        return
    total = sum(map(len, points_of(settings)))
    saver = Saver(file, settings, total - len(missing), total, say)
    for row in rows:
        saver.save(row)
