"""Captures an iteration of a rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile


def capture(step: Callable[[], None], folder: Path, rank: int, *, gpu: bool = False) -> None:
    """Write the execution trace and the Kineto trace of one call into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    observer = ExecutionTraceObserver().register_callback(str(folder / f"rank{rank}.et.json"))
    with profile(
        activities=activities, record_shapes=True, execution_trace_observer=observer
    ) as profiler:
        step()
    profiler.export_chrome_trace(str(folder / f"rank{rank}.kineto.json"))
