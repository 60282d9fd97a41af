"""Iterations whose pace the host sets: how much of them, why, and what settles it."""

from __future__ import annotations

from dataclasses import dataclass

from predictor.hardware.loader import list_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.iteration.critical_path import HOST
from predictor.predict import Prediction
from shardopt.formatting import percent

DECIDES = 0.3
"""Share of an iteration that waits for the host from which on this is the first thing to say."""


@dataclass(frozen=True)
class HostBound:
    """A device that waits for its host.

    Args:
        share: of the iteration.
        why: in words.
        remedy: what to do.
    """

    share: float
    why: str
    remedy: str


def host_bound(prediction: Prediction, hardware: HardwareProfile) -> HostBound | None:
    """Explain an iteration in which devices wait for the host; None where they hardly do."""
    if hardware.inline:
        return None
    share = prediction.breakdown.get(HOST, 0.0) / prediction.iteration_ms
    if share < DECIDES:
        return None
    why = f"for {percent(share)} of the iteration the GPU waits for the host that launches its work"
    faster = (
        "set OMP_NUM_THREADS=1 as torchrun does, capture the dense part as CUDA graphs, or give "
        "each rank a larger batch"
    )
    if hardware.origins["overheads"] in list_hardware():
        why += ", and hosts with the same GPU differ by a factor of two; yours is not measured"
        measure = "`shardopt calibrate --only host` measures yours in a minute; then "
        return HostBound(share, why, measure + faster)
    return HostBound(share, why, faster)


def host_words(bound: HostBound) -> str:
    """Say in one line that the host decides."""
    return f"The host decides: {bound.why}. {bound.remedy[0].upper()}{bound.remedy[1:]}."
