"""Blocks of memory in the order in which an iteration takes and gives them, and their sums.

One list serves both sums: the bytes that are taken at once, and what the caching allocator reserves
for them, simulated after c10/cuda/CUDACachingAllocator.cpp (docs/model.md, chapter 14). A block
that another stream used comes back when the device is done with it, which the host learns late, as
it runs ahead.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
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
    """Return the bytes of a request, rounded as the allocator rounds it."""
    return max(BLOCK, -(-size // BLOCK) * BLOCK)


Pool = tuple[str, bool]
"""A stream, and whether requests are small."""


@dataclass(eq=False)
class Block:
    """Memory of one segment, with its neighbours there."""

    size: int
    start: int
    pool: Pool
    before: Block | None = None
    after: Block | None = None
    is_free: bool = False


class CachingAllocator:
    """Caching allocator of one device.

    `reserved_bytes` is the device memory that it holds; it never falls.
    """

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self._free: dict[Pool, list[tuple[int, int]]] = defaultdict(list)
        self._at: dict[int, Block] = {}

    def take(self, size: int, stream: str) -> Block:
        """Take a block of at least so many bytes for a stream."""
        size = block_bytes(size)
        pool = stream, size <= SMALL
        free = self._free[pool]
        at = bisect_left(free, (size, 0))
        block = self._at[free.pop(at)[1]] if at < len(free) else self._segment(size, pool)
        block.is_free = False
        rest = block.size - size
        if rest >= (BLOCK if pool[1] else SMALL + 1):
            tail = Block(rest, block.start + size, pool, block, block.after, is_free=True)
            if block.after is not None:
                block.after.before = tail
            block.after, block.size = tail, size
            self._at[tail.start] = tail
            insort(free, (rest, tail.start))
        return block

    def give(self, block: Block) -> None:
        """Give a block back to its stream, joined with free neighbours."""
        free = self._free[block.pool]
        for first, second in ((block, block.after), (block.before, block)):
            other = second if first is block else first
            if first is not None and second is not None and other is not None and other.is_free:
                free.remove((other.size, other.start))
                first.size += second.size
                first.after = second.after
                if second.after is not None:
                    second.after.before = first
                del self._at[second.start]
                block = first
        block.is_free = True
        insort(free, (block.size, block.start))

    def _segment(self, size: int, pool: Pool) -> Block:
        if size <= SMALL:
            size = SMALL_SEGMENT
        elif size < LARGE:
            size = LARGE_SEGMENT
        else:
            size = -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
        block = self._at[self.reserved_bytes] = Block(size, self.reserved_bytes, pool)
        self.reserved_bytes += size
        return block


COMPUTE, COPY, INPUT_DIST = "compute", "copy", "input_dist"
"""Streams that take memory: the default one, of batches to the device, of ids among ranks."""


@dataclass(frozen=True)
class Peak:
    """Peak of the bytes in use.

    Args:
        allocated_bytes: sum of the blocks in use.
        reserved_bytes: device memory that the allocator holds.
    """

    allocated_bytes: int
    reserved_bytes: int


class Ledger:
    """Blocks in use now, and the peak of their bytes.

    Args:
        simulate: whether blocks come from a caching allocator, as on a device; host memory comes
            and goes by the byte.
    """

    def __init__(self, *, simulate: bool) -> None:
        self._allocator = CachingAllocator() if simulate else None
        self._taken: dict[Hashable, tuple[int, Block | None, bool]] = {}
        self._late: list[Block] = []
        self.bytes = 0
        self.most_bytes = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._taken

    def take(
        self, key: Hashable, size: float, stream: str = COMPUTE, *, lent: bool = False
    ) -> None:
        """Take a block under a name that is free now; zero bytes take none.

        Args:
            lent: another stream uses it too, so it cannot be used again before `settle`.
        """
        whole, block = int(size), None
        if whole <= 0:
            return
        if self._allocator is not None:
            whole = block_bytes(whole)
            block = self._allocator.take(whole, stream)
        self._taken[key] = whole, block, lent
        self.bytes += whole
        self.most_bytes = max(self.most_bytes, self.bytes)

    def give(self, key: Hashable) -> None:
        """Give a block back; do nothing if no block has this name."""
        size, block, lent = self._taken.pop(key, (0, None, False))
        self.bytes -= size
        if block is not None and lent:
            self._late.append(block)
        elif block is not None and self._allocator is not None:
            self._allocator.give(block)

    def settle(self) -> None:
        """Make lent blocks usable again, as the device has caught up with the host."""
        for block in self._late:
            assert self._allocator is not None
            self._allocator.give(block)
        self._late = []

    def peak(self) -> Peak:
        """Return the peak so far."""
        reserved = self._allocator.reserved_bytes if self._allocator else self.most_bytes
        return Peak(self.most_bytes, reserved)
