"""Conversions, by hand."""

from __future__ import annotations

import pytest

from predictor import units


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (-1536, "-1.5 KiB"),
        (61.3 * units.GIB, "61.3 GiB"),
        (2048 * units.GIB, "2.0 TiB"),
        (5000 * 1024**4, "5000.0 TiB"),
    ],
)
def test_sizes_have_a_binary_unit(size: float, text: str) -> None:
    assert units.format_bytes(size) == text


@pytest.mark.parametrize(
    ("size", "text"), [(1, "1 B"), (1025, "1.1 KiB"), (2**30, "1.0 GiB"), (2**40 + 1, "1.1 TiB")]
)
def test_what_is_missing_is_rounded_up(size: int, text: str) -> None:
    assert units.format_bytes(size, round_up=True) == text
