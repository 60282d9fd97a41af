"""The clock around steps of a training, and the trace of them, on CPUs and GPUs alike.

On a GPU a step ends when its stream gets there: times are those of CUDA events. Tests run this path
on a stand-in for a device.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

TRACE_LEAD, TRACE_STEPS = 2, 6
"""Steps of a trace: the first are not recorded."""


def steps_ms(step: Callable[[], object], count: int, device: Any) -> list[float]:
    """Milliseconds of each of so many steps, without a barrier between them."""
    marks = [_mark(device)]
    for _ in range(count):
        step()
        marks.append(_mark(device))
    if device.type != "cuda":
        return [(b - a) / 1e6 for a, b in pairwise(marks)]
    marks[-1].synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


def _mark(device: Any) -> Any:
    """Now: on the clock in ns, or in the stream of the GPU."""
    if device.type != "cuda":
        return time.perf_counter_ns()
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def trace_steps(step: Callable[[], object], path: Path, device: Any) -> None:
    """Write a Kineto trace of some steps, with the shapes of ops; of a GPU its kernels too."""
    from torch.profiler import ProfilerActivity, profile, schedule

    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    path.parent.mkdir(parents=True, exist_ok=True)
    with profile(
        activities=activities,
        record_shapes=True,
        schedule=schedule(wait=0, warmup=TRACE_LEAD, active=TRACE_STEPS, repeat=1),
    ) as profiler:
        for _ in range(TRACE_LEAD + TRACE_STEPS):
            step()
            profiler.step()
    profiler.export_chrome_trace(str(path))
