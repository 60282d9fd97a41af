"""Recording a training loop for `shardopt learn`: untraced steps are timed, then some are traced.

A profiler slows the host down: a traced step of TorchRec takes up to 1.5 times as long as it does
otherwise. So the traces say what an untraced step takes, in their metadata.
"""

from __future__ import annotations

import json
import statistics
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from predictor.errors import InputError
from predictor.trace.kineto import RECORDING
from shardopt.extras import needs_torchrec

with needs_torchrec():
    import torch
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, schedule

PROFILER_STARTS = 1
"""Steps in which the profiler runs and records nothing yet."""


class Recorder:
    """Counts steps; see `record`.

    Attributes:
        files: what was written.
        step_ms: median of the untraced steps; None before they are timed.
    """

    def __init__(self, folder: str | Path, warm_up: int, timed: int, traced: int) -> None:
        for name, value in (("warm_up", warm_up), ("timed", timed), ("traced", traced)):
            if value < (name != "warm_up"):
                raise InputError(
                    f"record: {name} is {value}; give at least {int(name != 'warm_up')}"
                )
        self.folder = Path(folder)
        self.warm_up, self.timed, self.traced = warm_up, timed, traced
        self.files: list[Path] = []
        self.step_ms: float | None = None
        self._steps = 0
        self._times: list[float] = []
        self._last = 0.0
        self._profile: Any = None

    def step(self) -> None:
        """Say that a training step has ended."""
        self._steps += 1
        done = self._steps - self.warm_up
        if done == 0:
            self._synchronize()
            self._last = time.perf_counter()
        elif 0 < done <= self.timed:
            if done == self.timed:
                self._synchronize()
            now = time.perf_counter()
            self._times.append((now - self._last) * 1e3)
            self._last = now
            if done == self.timed:
                self._start()
        elif self._profile is not None:
            if done == self.timed + PROFILER_STARTS + self.traced:
                self._finish()
            else:
                self._profile.step()

    def _start(self) -> None:
        # the host may run ahead of a device, so that the mean of all counts there
        on_device = torch.cuda.is_available()
        middle = statistics.fmean if on_device else statistics.median
        self.step_ms = middle(self._times)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
        # a schedule marks the steps in the trace
        whole = schedule(wait=0, warmup=PROFILER_STARTS, active=self.traced, repeat=1)
        self._profile = profile(activities=activities, record_shapes=True, schedule=whole)
        self._profile.start()

    def _finish(self) -> None:
        self._synchronize()
        metadata = {"step_ms": self.step_ms, "steps": self.timed}
        self._profile.add_metadata_json(RECORDING, json.dumps(metadata))
        self._profile.stop()
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank{rank}.json.gz"
        self._profile.export_chrome_trace(str(path))
        self.files.append(path)
        self._profile = None

    def close(self) -> None:
        """Write what there is; too few steps are warned about."""
        if self.files:
            return
        needed = self.warm_up + self.timed + PROFILER_STARTS + self.traced
        if self._profile is not None and self._steps > needed - self.traced:
            self._finish()
            return
        if self._profile is not None:
            self._profile.stop()
        warnings.warn(
            f"record: the loop ended after {self._steps} steps, and a recording takes {needed}; "
            "nothing was written. Run more steps, or give fewer as warm_up, timed and traced",
            stacklevel=3,
        )

    @staticmethod
    def _synchronize() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


@contextmanager
def record(
    folder: str | Path, *, warm_up: int = 10, timed: int = 40, traced: int = 4
) -> Iterator[Recorder]:
    """Record the steps of a training loop for `shardopt learn`, on every rank.

    Call ``step()`` of what it gives after each step::

        with record("traces") as recorder:
            while training:
                pipeline.progress(batches)
                recorder.step()

    Args:
        folder: for the traces, ``rank0.json.gz`` and so on.
        warm_up: steps before anything is timed.
        timed: steps without a profiler.
        traced: steps behind these that are traced.

    Raises:
        InputError: a number of steps is too small.
    """
    recorder = Recorder(folder, warm_up, timed, traced)
    yield recorder
    recorder.close()
