"""Schemas as execution traces spell them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from predictor.errors import InputError
from shardopt.replay.program.program import Term, Word
from shardopt.replay.program.schema import (
    EQUATION,
    MAX_SCALAR,
    WORDS,
    Parameter,
    UnwritableError,
    literal,
    parse_schema,
    python_number,
    read_by,
)
from tests.shardopt.replay.nodes import op, plain, tensor


def test_arguments_and_keywords() -> None:
    schema = parse_schema(
        "aten::add_.Tensor(Tensor(a!) self, Tensor? other, int[2] stride=[1, 1], *, "
        "Scalar alpha=1) -> Tensor(a!)"
    )
    assert (schema.name, schema.overload) == ("aten::add_", "Tensor")
    assert [p.name for p in schema.parameters] == ["self", "other", "stride", "alpha"]
    assert [p.keyword for p in schema.parameters] == [False, False, False, True]
    assert [p.written for p in schema.parameters] == [True, False, False, False]
    assert [p.base for p in schema.parameters] == ["Tensor", "Tensor", "int[2]", "Scalar"]


def test_lists_that_are_written() -> None:
    schema = parse_schema("fbgemm::f(Tensor[](a!) weights) -> (Tensor, Tensor(a)[], Tensor?)")
    assert schema.overload == "default"
    assert schema.parameters == (Parameter("weights", "Tensor[]", False, True),)
    assert parse_schema("a::b(Tensor x) -> ()").name == "a::b"


@pytest.mark.parametrize("text", ["", "aten::mm", "aten::mm(Tensor)", "aten::mm(Tensor a"])
def test_what_is_no_schema(text: str) -> None:
    with pytest.raises(InputError, match="not the schema"):
        parse_schema(text)


def of(kind: str) -> Parameter:
    return Parameter("x", kind, keyword=False, written=False)


def test_enumerations_and_lists() -> None:
    assert literal(6, of("ScalarType?"), "aten::to") == Word("torch.float32")
    assert literal("cuda:3", of("Device?"), "aten::to") == Word("device")
    assert literal((2, 3), of("SymInt[]"), "aten::view") == (2, 3)
    assert literal(None, of("MemoryFormat?"), "aten::clone") is None
    assert literal(float("-inf"), of("float"), "aten::f") == Word('float("-inf")')


def test_texts_are_words_or_refused() -> None:
    assert literal("mean", of("str"), "aten::scatter_reduce") == Word("'mean'")
    assert literal("ibnd, jbnd->bnij", of("str"), "aten::einsum") == Word("'abcd,ebcd->bcae'")
    for text in ("alice", "/data/users", "summary"):
        with pytest.raises(UnwritableError):
            literal(text, of("str"), "aten::f")


def test_scalars_that_may_be_ids_or_data_are_not_kept() -> None:
    assert literal(4815162342, of("Scalar"), "aten::eq") == 1
    assert literal(-1e9, of("Scalar"), "aten::masked_fill") == -1e9
    assert literal(3.14159, of("Scalar"), "aten::fill_") == 3.0
    assert literal(100_000, of("Scalar"), "aten::arange") == 100_000
    assert literal(0.9, of("Scalar"), "aten::mul") == 0.9


def test_objects_are_refused() -> None:
    with pytest.raises(UnwritableError, match="Generator"):
        literal("<Object>", of("Generator?"), "aten::bernoulli_")
    for value in (99, "/srv/alice", -1):
        with pytest.raises(UnwritableError, match="enumeration") as raised:
            literal(value, of("ScalarType"), "aten::to")
        assert str(value) not in str(raised.value)


def read(term: Term) -> Any:
    """Evaluate the written text of a term."""
    if isinstance(term, tuple):
        return tuple(read(item) for item in term)
    if isinstance(term, Word):
        return eval(term.text, {"__builtins__": {"float": float}})
    return eval(repr(term))


NUMBERS = st.one_of(st.integers(-(2**63), 2**64 - 1), st.booleans(), st.floats())


@given(st.one_of(NUMBERS, st.lists(NUMBERS, max_size=4).map(tuple)))
def test_numbers_of_an_ops_schema_come_back_as_they_were(value: Any) -> None:
    kind = "float[]" if isinstance(value, tuple) else "float"
    # nan differs from itself, 1 equals True: their texts tell
    assert repr(read(literal(value, of(kind), "aten::f"))) == repr(value)


@pytest.mark.parametrize("value", [-(2**63) - 1, 2**64])
def test_numbers_of_more_than_64_bits_are_refused(value: int) -> None:
    with pytest.raises(UnwritableError, match="64 bits"):
        literal(value, of("int"), "aten::f")


@given(NUMBERS)
def test_scalars_keep_small_numbers_alone(value: float) -> None:
    scalar = read(literal(value, of("Scalar"), "aten::eq"))
    assert type(scalar) is type(value)
    assert math.isfinite(scalar)
    if isinstance(value, int):
        assert abs(scalar) <= MAX_SCALAR
        assert scalar == value or abs(value) > MAX_SCALAR
    assert scalar == value or not math.isfinite(value) or abs(value) > MAX_SCALAR


@given(st.text())
def test_other_texts_are_refused_and_not_repeated(text: str) -> None:
    assume(text not in WORDS)
    assume(not EQUATION.fullmatch(text))
    with pytest.raises(UnwritableError, match="none of the words"):
        literal(text, of("str"), "aten::f")


@given(st.from_regex(EQUATION, fullmatch=True))
@settings(max_examples=50)
def test_equations_keep_their_structure_alone(text: str) -> None:
    written = read(literal(text, of("str"), "aten::einsum"))
    bare = text.replace(" ", "")
    assert len(written) == len(bare)
    # the same letters in the same places, and no others than the first of the alphabet
    assert len(set(zip(bare, written, strict=True))) == len(set(bare)) == len(set(written))
    letters = list(dict.fromkeys(c for c in written if c.isalpha()))
    assert letters == sorted(letters, key=lambda c: (c.isupper(), c))
    assert all(a == b for a, b in zip(bare, written, strict=True) if not a.isalpha())


MUL = "aten::mul.Tensor(Tensor self, Tensor other) -> Tensor"


@pytest.mark.parametrize(("kind", "number"), [("double", 1.0), ("long int", 1), ("bool", True)])
def test_a_number_beside_a_tensor(kind: str, number: float) -> None:
    operand = parse_schema(MUL).parameters[1]
    value = python_number(operand, tensor(5, 6, (), kind))
    assert value == number
    assert type(value) is type(number)


def test_what_is_a_tensor() -> None:
    own, operand = parse_schema(MUL).parameters
    assert python_number(own, tensor(5, 6, (), "double")) is None
    # PyTorch makes no tensor of this type of a number
    assert python_number(operand, tensor(5, 6, (), "float")) is None
    assert python_number(operand, tensor(5, 6, (1,), "double")) is None
    assert python_number(operand, plain(2.0, "Double")) is None
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
