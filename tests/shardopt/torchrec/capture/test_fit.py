"""Expressions of sizes, found exactly or not at all."""

from __future__ import annotations

import pytest

from predictor.model.captured.dense import parse_size
from shardopt.torchrec.capture.fit import SizeFit

NAMES = {
    "B": (512, 704, 1088, 1856),
    "n0": (1000, 60_019, 31_415, 92_653),
    "n1": (77, 5_003, 40_009, 8_171),
}


@pytest.mark.parametrize(
    "text",
    ["7", "64*B", "B + 1", "B/2", "100*B + n0", "2*n0 - n1 + 3", "4*B*B", "64*B*n1", "B*B/2 - B/2"],
)
def test_an_expression_is_found_from_its_values(text: str) -> None:
    expression = parse_size(text)
    values = tuple(
        expression.value({name: of[at] for name, of in NAMES.items()}) for at in range(4)
    )
    found = SizeFit(NAMES).size(values)
    assert parse_size(str(found)) == expression


@pytest.mark.parametrize("values", [(1, 2, 4, 9), (512, 704, 1088, 1857), (3, 3, 3, 4)])
def test_what_fits_nothing_has_none(values: tuple[int, ...]) -> None:
    assert SizeFit(NAMES).size(values) is None
