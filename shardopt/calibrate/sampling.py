"""How one thing is timed: warm-up, repeats, one pinned thread, no garbage collector."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence

from shardopt.bench.timing import Samples

WARM_UP = 2
FEWEST, MOST = 7, 200
CLEAN_ENOUGH = 3
"""Undisturbed samples that suffice; with fewer all samples count, and their spread tells."""
PATIENCE = 3
"""Multiple of the time for a point, after which disturbed samples are taken as they are."""
DISTURBED_SHARE, DISTURBED_S = 0.02, 20e-6
"""Time off the core within a sample of a CPU kernel: another process ran there meanwhile."""
FLUSH_BYTES = 8 * 2**20
"""Written before a sample: within an iteration other work takes the caches between two kernels."""
SETTINGS = "one thread a rank, pinned, gc off, 8 MiB flushed between samples"


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

    def __init__(self, device: str) -> None:
        import torch

        self.device = device
        self._buffer = torch.zeros(FLUSH_BYTES // 4, device=device)
        self._synchronize = torch.cuda.synchronize if device == "cuda" else _nothing

    def flush(self) -> None:
        """Displace what the caches hold, and fault in nothing."""
        self._buffer.add_(1.0)
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
