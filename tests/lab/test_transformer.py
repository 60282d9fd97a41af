from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.transformer import FAMILIES, TransformerShape, parse_shape

sizes = st.integers(min_value=1, max_value=5000)


@given(st.sampled_from(FAMILIES), st.tuples(*[sizes] * 7))
def test_names_tell_the_shape(family: str, numbers: tuple[int, ...]) -> None:
    shape = TransformerShape(family, *numbers)
    assert parse_shape(shape.name) == shape


@pytest.mark.parametrize("name", ["", "bert", "t5-l1-d8-h1-f8-v8-s8-b8", "bert-l1-d8-h1-f8-v8-s8"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not the name of a transformer"):
        parse_shape(name)


def test_flop_of_a_linear_model_is_six_per_weight_and_token() -> None:
    shape = TransformerShape("bert", 1, 64, 1, 256, 0, 1, 10)
    weights = 4 * 64**2 + 2 * 64 * 256
    assert shape.flop == 6 * 10 * (weights + 2 * 64)
