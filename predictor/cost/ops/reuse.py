"""How much other memory a step goes through before it touches the same memory again.

What a kernel reads costs more the longer ago it was last touched: a cache of S bytes that evicts
the least recently used holds what was touched less than S distinct bytes ago (stack distance,
Mattson et al. 1970). Distances follow from the ops of a step alone: their operands, and where the
allocator puts them. It is taken to fill the smallest free gap that is large enough and to merge
gaps that touch, as glibc does with large blocks.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from predictor.model.op_calls import OpCall, Operand

Array = NDArray[np.float64]

GRANULE = 16 * 1024
"""Bytes that are taken to be touched together."""
ALIGNMENT = 64
EDGES = tuple(2.0**power for power in range(19, 30))
"""Distances in bytes, 0.5 MiB to 512 MiB, between the bins."""
BINS = len(EDGES) + 1
STEPS = 2
"""The step is gone through so often that its start finds what the step before left."""


class Arena:
    """Addresses of memory that is taken and given back."""

    def __init__(self) -> None:
        self.top = 0
        self.taken: dict[int, tuple[int, int]] = {}
        self.gaps: list[tuple[int, int]] = []

    def take(self, storage: int, size: int) -> None:
        """Give a number an address; nothing happens if it has one."""
        if storage in self.taken:
            return
        size = max(-(-size // ALIGNMENT) * ALIGNMENT, ALIGNMENT)
        fits = [(end - start, start, end) for start, end in self.gaps if end - start >= size]
        if fits:
            _, start, end = min(fits)
            self.gaps.remove((start, end))
            if start + size < end:
                bisect.insort(self.gaps, (start + size, end))
        else:
            # what lies free at the end grows
            at_end = bool(self.gaps) and self.gaps[-1][1] == self.top
            start = self.gaps.pop()[0] if at_end else self.top
            self.top = start + size
        self.taken[storage] = (start, start + size)

    def give_back(self, storage: int) -> None:
        """Merge with the gaps on both sides; nothing happens to what has no address."""
        if storage not in self.taken:
            return
        start, end = self.taken.pop(storage)
        at = bisect.bisect(self.gaps, (start, end))
        if at < len(self.gaps) and self.gaps[at][0] == end:
            end = self.gaps.pop(at)[1]
        if at and self.gaps[at - 1][1] == start:
            at -= 1
            start = self.gaps.pop(at)[0]
        self.gaps.insert(at, (start, end))


class _Touched:
    """When each granule was touched last; never is before everything."""

    def __init__(self) -> None:
        self.last = np.full(1024, -1, dtype=np.int64)
        self.clock = 0

    def distances(self, first: int, end: int) -> Array:
        """Distinct bytes since the last touch of each granule in a range of bytes."""
        low, high = first // GRANULE, -(-end // GRANULE)
        while high > len(self.last):
            self.last = np.concatenate([self.last, np.full(len(self.last), -1, dtype=np.int64)])
        before = self.last[low:high]
        order = np.sort(self.last)
        later = len(order) - np.searchsorted(order, before, side="right")
        return np.where(before < 0, np.inf, later * float(GRANULE))

    def touch(self, first: int, end: int) -> None:
        """Now, in one moment."""
        self.clock += 1
        self.last[first // GRANULE : -(-end // GRANULE)] = self.clock


def reuse_bytes(calls: Sequence[OpCall]) -> list[Array]:
    """Bytes that each call touches, by the distance to their last touch, ``[BINS]`` a call.

    A call goes through its operands side by side, so what the call before touched lies as far back
    as all operands are large.

    Args:
        calls: of one step, which repeats; what it uses but has not made is there all the time.
    """
    arena, touched = Arena(), _Touched()
    held = _find_held(calls)
    for storage, size in held.items():
        arena.take(storage, size)
    found: list[Array] = []
    for _ in range(STEPS):
        found = [_call_bytes(call, arena, touched) for call in calls]
        for storage in [number for number in arena.taken if number not in held]:
            arena.give_back(storage)
    return found


def _find_held(calls: Sequence[OpCall]) -> dict[int, int]:
    """Memory that some call uses before any has made it."""
    made: set[int] = set()
    held: dict[int, int] = {}
    for call in calls:
        for operand in call.inputs:
            if operand.storage not in made:
                held[operand.storage] = operand.storage_bytes
        made |= {out.storage for out in call.outputs}
    return held


def _call_bytes(call: OpCall, arena: Arena, touched: _Touched) -> Array:
    sums = np.zeros(BINS)
    operands = list(_unlike(call.inputs + call.outputs))
    for operand in operands:
        arena.take(operand.storage, operand.storage_bytes)
    if call.moves:
        ranges = [_address(operand, arena) for operand in operands]
        together = sum(end - first for first, end in ranges)
        for operand, (first, end) in zip(operands, ranges, strict=True):
            distances = touched.distances(first, end) + together
            bins = np.searchsorted(EDGES, distances, side="right")
            sums += operand.bytes * np.bincount(bins, minlength=BINS) / len(bins)
        for first, end in ranges:
            touched.touch(first, end)
    for storage in call.freed:
        arena.give_back(storage)
    return sums


def _unlike(operands: Sequence[Operand]) -> Iterator[Operand]:
    """Each stretch of memory once, empty ones left out."""
    seen: set[tuple[int, tuple[int, int]]] = set()
    for operand in operands:
        key = (operand.storage, operand.span)
        if operand.elements and key not in seen:
            seen.add(key)
            yield operand


def _address(operand: Operand, arena: Arena) -> tuple[int, int]:
    start = arena.taken[operand.storage][0]
    first, end = operand.span
    return start + first, start + end
