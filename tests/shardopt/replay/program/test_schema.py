"""Schemas as execution traces spell them."""

import pytest

from predictor.errors import InputError
from shardopt.replay.program.schema import parse_schema


def test_arguments_keywords_and_returns() -> None:
    schema = parse_schema(
        "aten::add_.Tensor(Tensor(a!) self, Tensor? other, int[2] stride=[1, 1], *, "
        "Scalar alpha=1) -> Tensor(a!)"
    )
    assert (schema.name, schema.overload, schema.returns) == ("aten::add_", "Tensor", ("Tensor",))
    assert [p.name for p in schema.parameters] == ["self", "other", "stride", "alpha"]
    assert [p.keyword for p in schema.parameters] == [False, False, False, True]
    assert [p.written for p in schema.parameters] == [True, False, False, False]
    assert [p.base for p in schema.parameters] == ["Tensor", "Tensor", "int[2]", "Scalar"]
    assert schema.parameters[2].default == "[1, 1]"


def test_several_returns_and_lists() -> None:
    schema = parse_schema("fbgemm::f(Tensor[](a!) weights) -> (Tensor, Tensor(a)[], Tensor?)")
    assert schema.overload == "default"
    assert schema.returns == ("Tensor", "Tensor[]", "Tensor?")
    assert schema.parameters[0].type == "Tensor[]"
    assert parse_schema("a::b(Tensor x) -> ()").returns == ()


@pytest.mark.parametrize("text", ["", "aten::mm", "aten::mm(Tensor)", "aten::mm(Tensor a"])
def test_what_is_no_schema(text: str) -> None:
    with pytest.raises(InputError, match="not the schema"):
        parse_schema(text)
