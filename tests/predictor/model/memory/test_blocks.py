"""Blocks taken and given: the most at once, and what lent ones cost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from predictor.model.memory.blocks import (
    COMPUTE,
    LARGE_SEGMENT,
    SMALL_SEGMENT,
    Block,
    CachingAllocator,
    Ledger,
    block_bytes,
)

MIB = 1 << 20


def test_what_another_stream_used_is_free_once_the_device_caught_up() -> None:
    for settled, reserved in ((False, 80 * MIB), (True, 40 * MIB)):
        ledger = Ledger(simulate=True)
        ledger.take("a", 40 * MIB, COMPUTE, lent=True)
        ledger.give("a")
        if settled:
            ledger.settle()
        ledger.take("b", 40 * MIB)
        assert ledger.peak().allocated_bytes == 40 * MIB
        assert ledger.peak().reserved_bytes == reserved


def test_segments_are_of_2_mib_20_mib_or_the_request_in_steps_of_2_mib() -> None:
    for size, segment in ((1, SMALL_SEGMENT), (3 * MIB, LARGE_SEGMENT), (11 * MIB, 12 * MIB)):
        allocator = CachingAllocator()
        allocator.take(size, "compute")
        assert allocator.reserved_bytes == segment


def test_a_block_is_split_and_joined_again() -> None:
    allocator = CachingAllocator()
    allocator.give(allocator.take(40 * MIB, "compute"))
    parts = [allocator.take(size * MIB, "compute") for size in (12, 28)]
    for part in parts:
        allocator.give(part)
    allocator.take(40 * MIB, "compute")
    assert allocator.reserved_bytes == 40 * MIB


def test_a_stream_cannot_use_what_another_gave_back() -> None:
    allocator = CachingAllocator()
    allocator.give(allocator.take(40 * MIB, "compute"))
    allocator.take(40 * MIB, "copy")
    assert allocator.reserved_bytes == 80 * MIB


@given(st.lists(st.tuples(st.integers(1, 64 * MIB), st.booleans()), max_size=40))
def test_it_reserves_at_least_what_is_taken(steps: list[tuple[int, bool]]) -> None:
    allocator = CachingAllocator()
    blocks: list[Block] = []
    for size, keep in steps:
        before = allocator.reserved_bytes
        blocks.append(allocator.take(size, "compute"))
        assert blocks[-1].size >= block_bytes(size)
        assert allocator.reserved_bytes >= max(before, sum(block.size for block in blocks))
        if not keep:
            allocator.give(blocks.pop())
    most = allocator.reserved_bytes
    for block in blocks:
        allocator.give(block)
    # all that was split is whole again: the largest request finds room
    if steps:
        allocator.take(max(size for size, _ in steps), "compute")
        assert allocator.reserved_bytes == most
