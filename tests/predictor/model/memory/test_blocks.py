"""Blocks taken and given: the most at once, and what lent ones cost."""

from __future__ import annotations

from predictor.model.memory.blocks import COMPUTE, Ledger

MIB = 1 << 20


def test_host_memory_comes_and_goes_by_the_byte() -> None:
    ledger = Ledger(simulate=False)
    ledger.take("a", 10)
    ledger.take("b", 5)
    ledger.give("a")
    ledger.take("c", 7)
    assert (ledger.bytes, ledger.most_bytes) == (12, 15)
    assert ledger.peak().reserved_bytes == 15


def test_no_bytes_are_no_block_and_what_is_not_there_is_not_given() -> None:
    ledger = Ledger(simulate=True)
    ledger.take("a", 0.0)
    assert "a" not in ledger
    ledger.give("a")
    assert ledger.peak().reserved_bytes == 0


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
