"""Python numbers that ops take as tensors."""

import pytest

from shardopt.replay.program.program import Number
from shardopt.replay.program.scalars import python_number, read_by
from shardopt.replay.program.schema import parse_schema
from tests.shardopt.replay.nodes import op, plain, tensor

MUL = "aten::mul.Tensor(Tensor self, Tensor other) -> Tensor"


@pytest.mark.parametrize(("kind", "number"), [("double", 1.0), ("long int", 1), ("bool", True)])
def test_a_number_beside_a_tensor(kind: str, number: float) -> None:
    other = parse_schema(MUL).parameters[1]
    found = python_number(other, tensor(5, 6, (), kind))
    assert found == Number(number)
    assert type(found.value) is type(number)


def test_what_is_a_tensor() -> None:
    own, other = parse_schema(MUL).parameters
    assert python_number(own, tensor(5, 6, (), "double")) is None
    # PyTorch makes no tensor of this type of a number
    assert python_number(other, tensor(5, 6, (), "float")) is None
    assert python_number(other, tensor(5, 6, (1,), "double")) is None
    assert python_number(other, plain(2.0, "Double")) is None
    written = parse_schema("a::f(Tensor(a!) other) -> ()").parameters[0]
    assert python_number(written, tensor(5, 6, (), "double")) is None


def test_the_rest_is_read() -> None:
    first, number = tensor(1, 2), tensor(5, 6, (), "double")
    assert list(read_by(op(3, "aten::mul", [first, number], schema=MUL))) == [first]
    # without a schema to go by, all of it
    assert list(read_by(op(3, "aten::mul", [first, number], schema="?"))) == [first, number]
    assert list(read_by(op(3, "f", [number], schema="a::f(Tensor other) -> Tensor"))) == []
    more = [number, number]
    assert list(read_by(op(3, "f", more, schema="a::f(Tensor x) -> Tensor"))) == more
