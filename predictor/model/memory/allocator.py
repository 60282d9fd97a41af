"""PyTorch's caching allocator, simulated: what it reserves of a device for blocks taken and given.

c10/cuda/CUDACachingAllocator.cpp: sizes are rounded to 512 bytes; a request takes the smallest free
block of its stream that is large enough, which is split where enough is left over; neighbours in
one segment are joined when they are given back; else a new segment is taken from the device, and
none is returned. A block that another stream used comes back when the device is done with it, which
the host learns late, as it runs ahead.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass

BLOCK = 512
"""kMinBlockSize: sizes are multiples of it."""
SMALL = 1 << 20
"""kSmallSize: up to here requests share segments of `SMALL_SEGMENT`; less is not split off."""
SMALL_SEGMENT = 2 << 20
"""kSmallBuffer; also kRoundLarge, to which large segments are rounded."""
LARGE = 10 << 20
"""kMinLargeAlloc: below it requests share segments of `LARGE_SEGMENT`."""
LARGE_SEGMENT = 20 << 20
"""kLargeBuffer."""


def block_bytes(size: int) -> int:
    """A request as the allocator counts it."""
    return max(BLOCK, -(-size // BLOCK) * BLOCK)


@dataclass(eq=False)
class _Block:
    size: int
    start: int
    before: _Block | None = None
    after: _Block | None = None
    is_free: bool = False


class CachingAllocator:
    """One device's.

    `reserved_bytes` is what it holds of the device, which never falls.
    """

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self._free: dict[tuple[str, bool], list[tuple[int, int]]] = {}
        self._at: dict[int, _Block] = {}
        self._taken: dict[Hashable, tuple[_Block, tuple[str, bool]]] = {}
        self._end = 0

    def take(self, key: Hashable, size: int, stream: str) -> None:
        """Takes a block for a stream.

        Args:
            size: in bytes.
        """
        size = block_bytes(size)
        pool = stream, size <= SMALL
        free = self._free.setdefault(pool, [])
        at = bisect_left(free, (size, 0))
        block = self._at[free.pop(at)[1]] if at < len(free) else self._segment(size)
        block.is_free = False
        rest = block.size - size
        if rest >= (BLOCK if pool[1] else SMALL + 1):
            tail = _Block(rest, block.start + size, block, block.after, is_free=True)
            if block.after is not None:
                block.after.before = tail
            block.after, block.size = tail, size
            self._at[tail.start] = tail
            insort(free, (rest, tail.start))
        self._taken[key] = block, pool

    def give(self, key: Hashable) -> None:
        """Gives a block back to its stream."""
        block, pool = self._taken.pop(key)
        free = self._free[pool]
        if block.after is not None and block.after.is_free:
            self._join(free, block, block.after)
        if block.before is not None and block.before.is_free:
            free.remove((block.before.size, block.before.start))
            block, joined = block.before, block
            self._absorb(block, joined)
        block.is_free = True
        insort(free, (block.size, block.start))

    def rename(self, key: Hashable, to: Hashable) -> None:
        """The same block under another name."""
        self._taken[to] = self._taken.pop(key)

    def _segment(self, size: int) -> _Block:
        if size <= SMALL:
            size = SMALL_SEGMENT
        elif size < LARGE:
            size = LARGE_SEGMENT
        else:
            size = -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
        block = _Block(size, self._end)
        self._at[block.start] = block
        self._end += size
        self.reserved_bytes += size
        return block

    def _join(self, free: list[tuple[int, int]], block: _Block, after: _Block) -> None:
        free.remove((after.size, after.start))
        self._absorb(block, after)

    def _absorb(self, block: _Block, after: _Block) -> None:
        block.size += after.size
        block.after = after.after
        if after.after is not None:
            after.after.before = block
        del self._at[after.start]
