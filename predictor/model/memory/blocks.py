"""Blocks of memory in the order in which an iteration takes and gives them, and their sums.

One list serves both sums: the bytes that are taken at once, and what the caching allocator reserves
for them.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from predictor.model.memory.allocator import CachingAllocator, block_bytes

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
