"""Iterations whose pace the host sets: how much of them, why, and what settles it."""

from __future__ import annotations

from dataclasses import dataclass

from predictor.hardware.loader import list_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.iteration.critical_path import HOST
from predictor.predict import Prediction
from shardopt.formatting import percent

DECIDES = 0.3
"""Share of an iteration from which on the host is the first thing to say."""


@dataclass(frozen=True)
class HostBound:
    """Host that sets the pace of the device.

    Args:
        share: of the critical path that is the host issuing work.
        why: in words.
        remedy: what to do.
    """

    share: float
    why: str
    remedy: str


def host_bound(
    prediction: Prediction, hardware: HardwareProfile, *, cuda_graphs: bool = False
) -> HostBound | None:
    """Explain an iteration whose pace the host sets; None where it hardly does.

    Args:
        cuda_graphs: the dense part is captured already.
    """
    if hardware.inline:
        return None
    share = prediction.breakdown.get(HOST, 0.0) / prediction.iteration_ms
    if share < DECIDES:
        return None
    why = f"launching the GPU's work sets the pace for {percent(share)} of the iteration"
    capture = "" if cuda_graphs else ", capture the dense part as CUDA graphs,"
    faster = f"set OMP_NUM_THREADS=1 as torchrun does{capture} or give each rank a larger batch"
    if hardware.origins["overheads"] in list_hardware():
        why += ", and hosts with the same GPU differ by a factor of two; yours is not measured"
        measure = "`shardopt calibrate --only host` measures yours in a minute; then "
        return HostBound(share, why, measure + faster)
    return HostBound(share, why, faster)


def host_words(bound: HostBound) -> str:
    """Say in one line that the host decides."""
    return f"The host decides: {bound.why}. {bound.remedy[0].upper()}{bound.remedy[1:]}."
