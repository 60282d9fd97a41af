"""How things are timed: warm-up, repeats, side by side, and whether the samples agree.

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
"""Undisturbed samples that suffice; with fewer all samples count, and their spread tells."""
PATIENCE = 3
"""Multiple of the time for a point, after which disturbed samples are taken as they are."""
DISTURBED_SHARE, DISTURBED_S = 0.02, 20e-6
"""Time off the core within a sample of a CPU kernel: another process ran there meanwhile."""
FLUSH_BYTES = 128 * 2**20
"""Read before a sample: an iteration goes through so much memory between two runs of a kernel, and
what a kernel finds in no cache it copies at less than half the speed."""
BRIEF_FLUSH_BYTES = 8 * 2**20
"""Read where there is no time for more: what the core's own caches hold."""
SETTINGS = "one thread a rank, pinned"
CUDA_SETTINGS = "CUDA events, memory of 4 L2 written and read before a sample"
L2_MULTIPLE = 4
"""Of the L2, written and read before a sample: replacement is not exactly least recently used."""
UNKNOWN_L2_BYTES = 64 * 2**20
MOST_WRITES = 64
"""Times the memory is written at most: some milliseconds, which no launch takes."""
REFERENCE_VERSION = 1
"""Of the fixed kernels in `shardopt.measure.reference`; here, as reading it needs no torch."""
UNSTABLE_DEVIATION = 0.1
UNSTABLE_EXTREME = 0.5
"""As pyperf: a standard deviation of 10 % of the mean, or a sample 50 % off the mean."""


@dataclass(frozen=True)
class Samples:
    """Seconds of one thing, in the order measured; at least one."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The middle sample, or the mean of the two middle ones."""
        return statistics.median(self.seconds)

    @property
    def stable(self) -> bool | None:
        """Whether the samples agree with each other; None for a single one."""
        if len(self.seconds) < 2:
            return None
        mean = statistics.fmean(self.seconds)
        extreme = max(max(self.seconds) - mean, mean - min(self.seconds))
        deviation = statistics.stdev(self.seconds)
        return deviation < UNSTABLE_DEVIATION * mean and extreme < UNSTABLE_EXTREME * mean

    def overlaps(self, other: Samples) -> bool:
        """Whether some sample of each lies in the range of the other: no ratio to speak of."""
        return min(self.seconds) <= max(other.seconds) and min(other.seconds) <= max(self.seconds)


class Timer(ABC):
    """Times calls on one device."""

    device: str

    @abstractmethod
    def flush(self) -> None:
        """Displace what the caches hold, and fault in nothing."""

    @abstractmethod
    def sample(self, call: Callable[[], object]) -> tuple[float, bool]:
        """Seconds of one call, and whether nothing else is in them."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all that was issued."""

    def seconds(self, call: Callable[[], object]) -> float:
        """Of one call."""
        return self.sample(call)[0]

    def samples(self, call: Callable[[], object], seconds: float) -> Samples:
        """Repeats until ``seconds`` are spent, at least `FEWEST` and at most `MOST`."""
        for _ in range(WARM_UP):
            call()
        start = time.perf_counter()
        taken: list[tuple[float, bool]] = []
        while needs_more(taken, time.perf_counter() - start, seconds):
            self.flush()
            taken.append(self.sample(call))
        return choose_samples(taken)


class CpuTimer(Timer):
    """By the process's clock; a sample is clean unless another process took the core."""

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
        taken = time.perf_counter() - start
        away = taken - (time.process_time() - busy)
        del result  # its memory is given back outside the timed stretch
        return taken, away < DISTURBED_S + DISTURBED_SHARE * taken

    def synchronize(self) -> None:
        """Everything is done when it returns."""


class CudaTimer(Timer):
    """Time on the device alone, between an event before and an event after what a call launches.

    Host code of a fused lookup takes longer than its kernels, so on an idle device the time between
    the events would be the host's. The device is therefore still busy emptying its L2 when the call
    is issued: where the first event has passed by the time that the call returns, the device may
    have waited for the host, the sample does not count as clean, and the next flush is twice as
    long. Calls that synchronise inside never are clean, and count with what they wait.

    The L2 is emptied because an iteration goes through gigabytes between two runs of a kernel. The
    memory is written, so that no line of it is shared, and read after, so that its lines are clean:
    a timed kernel that evicts written lines would pay for another's stores.
    """

    device = "cuda"

    def __init__(self, cuda: Any, buffer: Any) -> None:
        """``cuda`` is ``torch.cuda``, ``buffer`` memory of a multiple of the L2."""
        self._cuda, self._buffer = cuda, buffer
        self.writes = 1

    def flush(self) -> None:
        """Issue the writes and the reading; the device is busy with them when this returns."""
        for _ in range(self.writes):
            self._buffer.fill_(1.0)
        self._buffer.sum()

    def sample(self, call: Callable[[], object]) -> tuple[float, bool]:
        """As in `Timer`; to be called right after `flush`."""
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
    """The timer of a kind of device; ``flush_bytes`` are a CPU's."""
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
    """Samples of forward and backward passes, alternating until ``seconds`` are spent.

    Args:
        forward: given the number of the repeat.
        backward: given what the forward before it returned.
    """
    return sample_stages(timer, (lambda i, _: forward(i), lambda _, made: backward(made)), seconds)


def sample_stages(
    timer: Timer, stages: Sequence[Callable[[int, Any], Any]], seconds: float
) -> list[Samples]:
    """Samples of every stage, run one after the other until ``seconds`` are spent.

    Args:
        stages: given the number of the repeat, and what the stage before returned.
    """
    spent: list[list[tuple[float, bool]]] = [[] for _ in stages]
    start, i = time.perf_counter(), 0
    while i < WARM_UP or needs_more(spent[-1], time.perf_counter() - start, seconds):
        if i == WARM_UP:
            start = time.perf_counter()
            for taken in spent:
                taken.clear()
        made: list[Any] = [None]
        for stage, taken in zip(stages, spent, strict=True):
            timer.flush()
            taken.append(timer.sample(partial(_append, made, stage, i)))
        i += 1
    return [choose_samples(taken) for taken in spent]


def _append(made: list[Any], stage: Callable[[int, Any], Any], repeat: int) -> None:
    """Keep what earlier stages returned: giving its memory back would be timed too."""
    made.append(stage(repeat, made[-1]))


def needs_more(taken: Sequence[tuple[float, bool]], spent: float, seconds: float) -> bool:
    """Whether a point needs more samples: at least `FEWEST` clean ones, for ``seconds``."""
    clean = sum(good for _, good in taken)
    if len(taken) >= MOST:
        return False
    if clean < FEWEST:
        return len(taken) < FEWEST or spent < PATIENCE * seconds
    return spent < seconds


def choose_samples(taken: Sequence[tuple[float, bool]]) -> Samples:
    """The samples during which no other process took the core, where there are enough."""
    clean = tuple(seconds for seconds, good in taken if good)
    return Samples(clean if len(clean) >= CLEAN_ENOUGH else tuple(s for s, _ in taken))


def sample_gradients(
    timer: Timer, forward: Callable[[], Any], inputs: Sequence[Any], seconds: float
) -> list[Samples]:
    """As `sample_passes`, of the gradients of tensors, which keep none."""
    import torch

    made = forward()
    gradients = [torch.full_like(y, 1e-3) for y in (made if isinstance(made, tuple) else (made,))]

    def backward(made: Any) -> Any:
        # not .backward(), which would add to the gradient of the sample before
        return torch.autograd.grad(made, inputs, gradients)

    return sample_passes(timer, lambda _: forward(), backward, seconds)


def interleave(
    what: Mapping[str, Callable[[], float]],
    repeat: int,
    on_start: Callable[[str, int], None],
) -> dict[str, Samples]:
    """Measure everything once a round, so that a busy machine disturbs all of it alike.

    Args:
        what: name -> a call that returns its seconds.
        repeat: rounds, >= 1. Each starts with another one, so that none is always first.
        on_start: called with the name and the round, from 0, before each call.
    """
    names = list(what)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(repeat):
        first = round_ % len(names)
        for name in names[first:] + names[:first]:
            on_start(name, round_)
            samples[name].append(what[name]())
    return {name: Samples(tuple(seconds)) for name, seconds in samples.items()}
