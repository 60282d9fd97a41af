"""How one thing is timed: warm-up, repeats, one pinned thread, no garbage collector."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from shardopt.bench.timing import Samples

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
SETTINGS = "one thread a rank, pinned, gc off"


def settle(rank: int, cores: tuple[int, ...]) -> None:
    """Pin this process to one core and one thread; before torch starts threads of its own."""
    gc.disable()
    os.environ["OMP_NUM_THREADS"] = "1"
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    import torch

    torch.set_num_threads(1)


class Timer:
    """Times calls on one device; on a GPU the device is idle before and after each."""

    def __init__(self, device: str, flush_bytes: int = FLUSH_BYTES) -> None:
        import torch

        self.device = device
        # ones: pages that nobody wrote are all the same page of zeros
        self._buffer = torch.ones(flush_bytes // 4, device=device)
        self._synchronize = torch.cuda.synchronize if device == "cuda" else _nothing

    def flush(self) -> None:
        """Displace what the caches hold, and fault in nothing."""
        self._buffer.sum()
        self._synchronize()

    def seconds(self, call: Callable[[], object]) -> float:
        """Of one call."""
        return self.sample(call)[0]

    def sample(self, call: Callable[[], object]) -> tuple[float, bool]:
        """Seconds of one call, and whether this process had its core to itself."""
        busy, start = time.process_time(), time.perf_counter()
        result = call()
        self._synchronize()
        taken = time.perf_counter() - start
        away = taken - (time.process_time() - busy)
        del result  # its memory is given back outside the timed stretch
        return taken, self.device == "cuda" or away < DISTURBED_S + DISTURBED_SHARE * taken

    def samples(self, call: Callable[[], object], seconds: float) -> Samples:
        """Repeats until ``seconds`` are spent, at least `FEWEST` and at most `MOST`."""
        for _ in range(WARM_UP):
            call()
        start = time.perf_counter()
        taken: list[tuple[float, bool]] = []
        while wanted(taken, time.perf_counter() - start, seconds):
            self.flush()
            taken.append(self.sample(call))
        return undisturbed(taken)


def passes(
    timer: Timer,
    forward: Callable[[int], Any],
    backward: Callable[[Any], object],
    seconds: float,
) -> tuple[Samples, Samples]:
    """Forward and backward in turns until ``seconds`` are spent.

    Args:
        forward: given the number of the repeat.
        backward: given what the forward before it returned.
    """
    spent: tuple[list[tuple[float, bool]], ...] = ([], [])
    start, i = time.perf_counter(), 0
    while i < WARM_UP or wanted(spent[1], time.perf_counter() - start, seconds):
        if i == WARM_UP:
            start = time.perf_counter()
            for taken in spent:
                taken.clear()
        outputs: list[Any] = []
        timer.flush()
        spent[0].append(timer.sample(partial(_keep, outputs, forward, i)))
        timer.flush()
        spent[1].append(timer.sample(partial(backward, outputs.pop())))
        i += 1
    return undisturbed(spent[0]), undisturbed(spent[1])


def _keep(to: list[Any], forward: Callable[[int], Any], repeat: int) -> None:
    to.append(forward(repeat))


def wanted(taken: Sequence[tuple[float, bool]], spent: float, seconds: float) -> bool:
    """Whether a point needs more samples: at least `FEWEST` clean ones, for ``seconds``."""
    clean = sum(good for _, good in taken)
    if len(taken) >= MOST:
        return False
    if clean < FEWEST:
        return len(taken) < FEWEST or spent < PATIENCE * seconds
    return spent < seconds


def undisturbed(taken: Sequence[tuple[float, bool]]) -> Samples:
    """The samples during which no other process took the core, where there are enough."""
    clean = tuple(seconds for seconds, good in taken if good)
    return Samples(clean if len(clean) >= CLEAN_ENOUGH else tuple(s for s, _ in taken))


def _nothing() -> None:
    pass
