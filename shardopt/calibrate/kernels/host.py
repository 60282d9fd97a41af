"""The host's time for framework ops and launches, and what waiting for the device takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from predictor.units import GIB, MIB
from shardopt.calibrate.design.points import MIX, Point
from shardopt.calibrate.rows import Measurement, row_of_samples
from shardopt.measure.sampling import CpuTimer, Timer
from shardopt.measure.timing import Samples

OPS_PER_SAMPLE = 200
"""Small ops are timed many at once: one is shorter than the clock is good for."""
TRIPS_PER_SAMPLE = 20


def measure_host(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Mean time of one of many, on the host's clock.

    ``op``: a small op recorded for the backward, over a mix of five; ``op_on_host``: the same on
    tensors of the host, which run the same framework code and launch nothing; ``round_trip``: an op
    and waiting until the device has done it; ``sync``: reading a value from an idle device.
    """
    import torch

    what = point.params["what"]
    device = "cpu" if what == "op_on_host" else timer.device
    x = torch.ones(8, device=device, requires_grad=what in ("op", "op_on_host"))

    def trips() -> None:
        for _ in range(TRIPS_PER_SAMPLE):
            torch.add(x, 1.0)
            timer.synchronize()

    def reads() -> None:
        for _ in range(TRIPS_PER_SAMPLE):
            x[0].item()

    calls: dict[str, tuple[int, Callable[[], object]]] = {
        "op": (OPS_PER_SAMPLE, lambda: _mix(x)),
        "op_on_host": (OPS_PER_SAMPLE, lambda: _mix(x)),
        "round_trip": (TRIPS_PER_SAMPLE, trips),
        "sync": (TRIPS_PER_SAMPLE, reads),
    }
    repeats, call = calls[what]
    clock = timer if timer.device == "cpu" else HostTimer(timer)
    taken = clock.samples(call, seconds).seconds
    facts: dict[str, Any] = {}
    if what == "op" and timer.device == "cuda":
        facts["device"] = _device()
    return [row_of_samples(point, Samples(tuple(t / repeats for t in taken)), "", **facts)]


def _device() -> dict[str, float]:
    """What the current GPU says of itself; of an unknown L2 nothing."""
    import torch

    about = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "sms": about.multi_processor_count,
        "memory_gib": round(about.total_memory / GIB, 2),
        "l2_mib": getattr(about, "L2_cache_size", 0) / MIB,
    }


class HostTimer(CpuTimer):
    """Times what the host does while a device works on behind it."""

    def __init__(self, device: Timer) -> None:
        super().__init__(flush_bytes=0)
        self._device = device

    def flush(self) -> None:
        """Let the device finish, so that no full queue stops the host."""
        self._device.synchronize()


def _mix(x: Any) -> None:
    import torch

    for _ in range(OPS_PER_SAMPLE // MIX):
        y = torch.add(x, 1.0)
        z = torch.cat((y, y))
        a, _ = torch.split(z, 8)
        torch.relu(a)
        a.view(2, 4)
