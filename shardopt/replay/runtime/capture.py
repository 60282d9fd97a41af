"""Captures an iteration of a rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile


def capture(
    step: Callable[[], None], folder: Path, rank: int, *, gpu: bool = False
) -> tuple[Path, Path]:
    """Write the execution trace and the Kineto trace of one call, and return both files."""
    folder.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    execution, kineto = (folder / f"rank{rank}.{kind}.json" for kind in ("et", "kineto"))
    observer = ExecutionTraceObserver().register_callback(str(execution))
    with profile(
        activities=activities, record_shapes=True, execution_trace_observer=observer
    ) as profiler:
        step()
    profiler.export_chrome_trace(str(kineto))
    return execution, kineto
