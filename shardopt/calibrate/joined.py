"""Calibration among ranks that torchrun has started, perhaps on several hosts.

The first rank measures the kernels, keeps the rows and says what is missing, and then what has to
be measured again; the others wait, and take part in what needs all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import chain, repeat
from typing import Any

from shardopt.calibrate.design.points import Point
from shardopt.calibrate.rows import CalibrationRows
from shardopt.calibrate.run import (
    CalibrationSettings,
    Say,
    doubtful,
    missing,
    open_rows,
    points_of,
    saver_of,
)
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
    device = prepare_quietly(join, settings.backend, settings.runtime)
    import torch.distributed as dist

    join_group(join, settings.backend)
    # gloo waits without working, and NCCL would give up after some minutes
    waiting = dist.new_group(backend="gloo", timeout=PATIENCE)
    for wanted in chain((missing,), repeat(doubtful)):
        chosen: list[Any] = [None, None]
        if file is not None:
            kernels, exchanges = (wanted(file, points) for points in points_of(settings))
            _measure_alone(settings, file, kernels, device, say)
            chosen = [exchanges, bool(kernels or exchanges)]
        dist.broadcast_object_list(chosen, src=0, group=waiting)
        if chosen[0]:
            _measure_together(settings, file, chosen[0], device, say)
        if wanted is doubtful and not chosen[1]:
            break
    dist.barrier()


def _measure_alone(
    settings: CalibrationSettings,
    file: CalibrationRows,
    kernels: Sequence[Point],
    device: Any,
    say: Say,
) -> None:
    from shardopt.calibrate.kernels.registry import measure_alone

    if kernels:
        saver = saver_of(settings, file, kernels, say)
        for row in measure_alone(kernels, device, settings.size, settings.model):
            saver.save(row)


def _measure_together(
    settings: CalibrationSettings,
    file: CalibrationRows | None,
    exchanges: Sequence[Point],
    device: Any,
    say: Say,
) -> None:
    from shardopt.calibrate.kernels.registry import measure_together

    rows = measure_together(exchanges, device, settings.size, settings.runtime, settings.hosts)
    if file is None:
        for _ in rows:
            pass
        return
    saver = saver_of(settings, file, exchanges, say)
    for row in rows:
        saver.save(row)
