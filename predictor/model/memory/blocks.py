"""Blocks of memory in the order in which an iteration takes and gives them, and their sums.

One list serves both sums: the bytes that are taken at once, and what the caching allocator reserves
for them.

PyTorch's caching allocator is simulated after c10/cuda/CUDACachingAllocator.cpp: sizes are rounded
to 512 bytes; a request takes the smallest free block of its stream that is large enough, which is
split where enough is left over; neighbours in one segment are joined when they are given back; else
a new segment is taken from the device, and none is returned. A block that another stream used comes
back when the device is done with it, which the host learns late, as it runs ahead.
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


COMPUTE, COPY, INPUT_DIST = "compute", "copy", "input_dist"
"""Streams that take memory: the default one, of batches to the device, of ids among ranks."""


@dataclass(frozen=True)
class Peak:
    """Most bytes at once.

    Args:
        allocated_bytes: of blocks that were taken.
        reserved_bytes: that the allocator holds of the device.
    """

    allocated_bytes: int
    reserved_bytes: int


class Ledger:
    """What is taken now, and the most that ever was.

    Args:
        simulate: whether blocks come from a caching allocator, as on a device; host memory comes
            and goes by the byte.
    """

    def __init__(self, *, simulate: bool) -> None:
        self._allocator = CachingAllocator() if simulate else None
        self._taken: dict[Hashable, tuple[int, bool]] = {}
        self._late: list[Hashable] = []
        self._marks = 0
        self.bytes = 0
        self.most_bytes = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._taken

    def take(
        self, key: Hashable, size: float, stream: str = COMPUTE, *, lent: bool = False
    ) -> None:
        """Takes a block under a name that nothing has now; of no bytes it is none.

        Args:
            lent: another stream uses it too, so it cannot be used again before `settle`.
        """
        whole = int(size)
        if whole <= 0:
            return
        if self._allocator is not None:
            whole = block_bytes(whole)
            self._allocator.take(key, whole, stream)
        self._taken[key] = whole, lent
        self.bytes += whole
        self.most_bytes = max(self.most_bytes, self.bytes)

    def give(self, key: Hashable) -> None:
        """Gives a block back; nothing if there is none of this name."""
        if key not in self._taken:
            return
        size, lent = self._taken.pop(key)
        self.bytes -= size
        if self._allocator is None:
            return
        if lent:
            self._marks += 1
            late = "late", self._marks
            self._allocator.rename(key, late)
            self._late.append(late)
        else:
            self._allocator.give(key)

    def settle(self) -> None:
        """The device has caught up with the host: what was lent can be used again."""
        for key in self._late:
            assert self._allocator is not None
            self._allocator.give(key)
        self._late = []

    def peak(self) -> Peak:
        """So far."""
        reserved = self._allocator.reserved_bytes if self._allocator else self.most_bytes
        return Peak(self.most_bytes, reserved)
