"""Timing: warm-up, repeats, interleaving, and the agreement of samples.

A CPU is timed by the clock. A GPU is timed between two of its events, and its L2 is emptied before
the first, see `CudaTimer`.

Why: docs/decisions/0022-calibration.md.
"""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

WARM_UP = 2
FEWEST, MOST = 7, 200
CLEAN_ENOUGH = 3
"""Undisturbed samples that suffice; with fewer all samples count, and their spread shows it."""
PATIENCE = 3
"""Multiple of a point's time after which disturbed samples count too."""
DISTURBED_SHARE, DISTURBED_S = 0.02, 20e-6
"""Time off the core that disturbs a sample of a CPU kernel: another process ran there meanwhile."""
FLUSH_BYTES = 128 * 2**20
"""Bytes read before a sample. An iteration goes through so much memory between two runs of a
kernel, and a kernel copies uncached data at less than half the speed."""
BRIEF_FLUSH_BYTES = 8 * 2**20
"""Bytes read where there is no time for more: the size of the core's own caches."""
SETTINGS = "one thread a rank, pinned"
CUDA_SETTINGS = "CUDA events, memory of 4 L2 written and read before a sample"
L2_MULTIPLE = 4
"""Multiple of the L2 to write and read before a sample: replacement is not exactly LRU."""
UNKNOWN_L2_BYTES = 64 * 2**20
MOST_WRITES = 64
"""Most writes of the memory: some milliseconds, longer than any launch."""
REFERENCE_VERSION = 1
"""Version of the kernels in `shardopt.measure.reference`; here, as reading it needs no torch."""
UNSTABLE_DEVIATION = 0.1
UNSTABLE_EXTREME = 0.5
"""Limits of stable samples, as in pyperf: a standard deviation of 10 % of the mean, and 50 % off
the mean for a single sample."""


@dataclass(frozen=True)
class Samples:
    """Seconds of repeated runs, in the order measured; at least one."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """Median of the samples in seconds."""
        return statistics.median(self.seconds)

    @property
    def stable(self) -> bool | None:
        """True if the samples agree with each other; None for a single one."""
        if len(self.seconds) < 2:
            return None
        mean = statistics.fmean(self.seconds)
        extreme = max(max(self.seconds) - mean, mean - min(self.seconds))
        deviation = statistics.stdev(self.seconds)
        return deviation < UNSTABLE_DEVIATION * mean and extreme < UNSTABLE_EXTREME * mean

    def overlaps(self, other: Samples) -> bool:
        """Return True if the ranges of both overlap, so that their ratio means nothing."""
        return min(self.seconds) <= max(other.seconds) and min(other.seconds) <= max(self.seconds)


class Timer(ABC):
    """Timer of calls on one device."""

    device: str

    @abstractmethod
    def flush(self) -> None:
        """Displace the content of the caches, without page faults."""

    @abstractmethod
    def sample(self, call: Callable[[], object]) -> tuple[float, bool]:
        """Time one call; returns its seconds, and True if nothing disturbed it."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all issued work."""

    def seconds(self, call: Callable[[], object]) -> float:
        """Time one call in seconds."""
        return self.sample(call)[0]

    def samples(self, call: Callable[[], object], seconds: float) -> Samples:
        """Repeat a call until ``seconds`` are spent, at least `FEWEST` and at most `MOST` times."""
        for _ in range(WARM_UP):
            call()
        start = time.perf_counter()
        repeats: list[tuple[float, bool]] = []
        while needs_more(repeats, time.perf_counter() - start, seconds):
            self.flush()
            repeats.append(self.sample(call))
        return choose_samples(repeats)


class CpuTimer(Timer):
    """Timer by the process's clock; a sample is clean unless another process took the core."""

    device = "cpu"

    def __init__(self, flush_bytes: int = FLUSH_BYTES) -> None:
        import torch

        # ones: pages that nobody wrote are all the same page of zeros
        self._buffer = torch.ones(flush_bytes // 4)

    def flush(self) -> None:
        self._buffer.sum()

    def sample(self, call: Callable[[], object]) -> tuple[float, bool]:
        busy, start = time.process_time(), time.perf_counter()
        result = call()
        elapsed = time.perf_counter() - start
        away = elapsed - (time.process_time() - busy)
        del result  # its memory is freed outside the timed stretch
        return elapsed, away < DISTURBED_S + DISTURBED_SHARE * elapsed

    def synchronize(self) -> None:
        """Return at once: a CPU's calls are done when they return."""


class CudaTimer(Timer):
    """Timer of the device alone, between events before and after the work that a call launches.

    Host code of a fused lookup takes longer than its kernels, so on an idle device the time between
    the events would be the host's. The device is therefore still busy emptying its L2 when the call
    is issued. If the first event has passed when the call returns, the device may have waited for
    the host: the sample is not clean, and the next flush is twice as long. Calls that synchronise
    inside are never clean, and their waiting counts.

    The L2 is emptied because an iteration goes through gigabytes between two runs of a kernel. The
    memory is written, so that no line of it is shared, and then read, so that its lines are clean:
    a timed kernel that evicts written lines would pay for another's stores.
    """

    device = "cuda"

    def __init__(self, cuda: Any, buffer: Any) -> None:
        """Take ``torch.cuda`` as ``cuda``, and memory of a multiple of the L2 as ``buffer``."""
        self._cuda, self._buffer = cuda, buffer
        self.writes = 1

    def flush(self) -> None:
        """Issue the writes and the reading; the device is busy with them when this returns."""
        for _ in range(self.writes):
            self._buffer.fill_(1.0)
        self._buffer.sum()

    def sample(self, call: Callable[[], object]) -> tuple[float, bool]:
        """Time one call as `Timer.sample` does; call it right after `flush`."""
        start, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = call()
        end.record()
        clean = not start.query()
        self._cuda.synchronize()
        if not clean:
            self.writes = min(2 * self.writes, MOST_WRITES)
        del result
        return start.elapsed_time(end) * 1e-3, clean

    def synchronize(self) -> None:
        self._cuda.synchronize()


def timer_of(device: str, flush_bytes: int = FLUSH_BYTES) -> Timer:
    """Return the timer of a kind of device; ``flush_bytes`` are a CPU's."""
    if device != "cuda":
        return CpuTimer(flush_bytes)
    import torch

    about = torch.cuda.get_device_properties(torch.cuda.current_device())
    l2_bytes = int(getattr(about, "L2_cache_size", 0)) or UNKNOWN_L2_BYTES
    return CudaTimer(torch.cuda, torch.empty(L2_MULTIPLE * l2_bytes // 4, device="cuda"))


def sample_passes(
    timer: Timer,
    forward: Callable[[int], Any],
    backward: Callable[[Any], object],
    seconds: float,
) -> list[Samples]:
    """Sample forward and backward passes, alternating until ``seconds`` are spent.

    Args:
        forward: called with the number of the repeat.
        backward: called with the output of the forward before it.
    """
    return sample_stages(timer, (lambda i, _: forward(i), lambda _, y: backward(y)), seconds)


def sample_stages(
    timer: Timer, stages: Sequence[Callable[[int, Any], Any]], seconds: float
) -> list[Samples]:
    """Sample every stage, run one after the other until ``seconds`` are spent.

    Args:
        stages: called with the number of the repeat, and the output of the stage before.
    """
    spent: list[list[tuple[float, bool]]] = [[] for _ in stages]
    start, i = time.perf_counter(), 0
    while i < WARM_UP or needs_more(spent[-1], time.perf_counter() - start, seconds):
        if i == WARM_UP:
            start = time.perf_counter()
            for repeats in spent:
                repeats.clear()
        outputs: list[Any] = [None]
        for stage, repeats in zip(stages, spent, strict=True):
            timer.flush()
            repeats.append(timer.sample(partial(_append, outputs, stage, i)))
        i += 1
    return [choose_samples(repeats) for repeats in spent]


def _append(outputs: list[Any], stage: Callable[[int, Any], Any], repeat: int) -> None:
    """Run a stage and keep all outputs: freeing their memory would be timed too."""
    outputs.append(stage(repeat, outputs[-1]))


def needs_more(repeats: Sequence[tuple[float, bool]], spent: float, seconds: float) -> bool:
    """Return True if a point needs more samples: at least `FEWEST` clean ones, for ``seconds``."""
    clean = sum(good for _, good in repeats)
    if len(repeats) >= MOST:
        return False
    if clean < FEWEST:
        return len(repeats) < FEWEST or spent < PATIENCE * seconds
    return spent < seconds


def choose_samples(repeats: Sequence[tuple[float, bool]]) -> Samples:
    """Choose the clean samples, or all where fewer than `CLEAN_ENOUGH` are clean."""
    clean = tuple(seconds for seconds, good in repeats if good)
    return Samples(clean if len(clean) >= CLEAN_ENOUGH else tuple(s for s, _ in repeats))


def sample_gradients(
    timer: Timer, forward: Callable[[], Any], inputs: Sequence[Any], seconds: float
) -> list[Samples]:
    """Sample a forward and the gradients of its inputs as `sample_passes` does; stores no grad."""
    import torch

    first = forward()
    outputs = first if isinstance(first, tuple) else (first,)
    gradients = [torch.full_like(output, 1e-3) for output in outputs]

    def backward(output: Any) -> Any:
        # not .backward(), which would add to the gradient of the sample before
        return torch.autograd.grad(output, inputs, gradients)

    return sample_passes(timer, lambda _: forward(), backward, seconds)


def interleave(
    calls: Mapping[str, Callable[[], float]],
    repeat: int,
    on_start: Callable[[str, int], None],
) -> dict[str, Samples]:
    """Measure everything once a round, so that a busy machine disturbs all of it alike.

    Args:
        calls: name -> a call that returns its seconds.
        repeat: rounds, >= 1. Each starts with another one, so that none is always first.
        on_start: called with the name and the round, from 0, before each call.
    """
    names = list(calls)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(repeat):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            on_start(name, round_)
            samples[name].append(calls[name]())
    return {name: Samples(tuple(seconds)) for name, seconds in samples.items()}
