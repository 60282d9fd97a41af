"""A replay's graph against the trace's."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardopt.replay.program.program import Call, Number, RankProgram, Slot, TensorSpec, Term
from tests.shardopt.replay.differences import LISTED, differences, signatures

HALF = TensorSpec((2, 3), (3, 1), "float16", 7)
FULL = TensorSpec((6,), (1,), "float32", 8, 2, True)


def call(op: str, *terms: Term, gives: tuple = (), specs: tuple = (), **more: Any) -> Call:
    return Call(op, "default", terms, {}, gives, (), 1, specs=specs, **more)


def program(*calls: Call, first: int = 0) -> RankProgram:
    return RankProgram(0, list(calls), {first: HALF}, {}, [], [])


def small(first: int = 0) -> RankProgram:
    """A split of which one part is read, and a wait."""
    part = first + 9
    return program(
        call("aten::split", Slot(first), Number(1), gives=((None, part),), specs=((HALF, FULL),)),
        call("wait", Number(0)),
        call("aten::relu", Slot(part), gives=(None,), specs=(FULL,), us=3.0),
        first=first,
    )


def test_a_signature_has_what_an_op_takes_and_gives() -> None:
    half, full = ((2, 3), (3, 1), "float16"), ((6,), (1,), "float32")
    assert signatures(small()) == [
        ("aten::split", "default", (half, "Number(value=1)"), ((half, full),), None),
        ("aten::relu", "default", (full,), (full,), None),
    ]


def test_numbers_memory_and_times_make_no_difference() -> None:
    moved = small(first=50)
    moved.made[50] = replace(HALF, storage=3, offset=9, host=True)
    moved.calls[2] = replace(moved.calls[2], us=None)
    assert signatures(moved) == signatures(small())


@pytest.mark.parametrize(
    "changed",
    [
        {"op": "aten::tanh"},
        {"overload": "out"},
        {"arguments": (Number(2),)},
        {"keywords": {"alpha": Number(2)}},
        {"specs": (replace(FULL, strides=(2,)),)},
        {"specs": (replace(FULL, dtype="float64"),)},
        {"specs": (None,)},
        {"bytes": 4},
    ],
)
def test_each_part_of_an_op_makes_a_difference(changed: dict) -> None:
    other = small()
    other.calls[2] = replace(other.calls[2], **changed)
    (said,) = differences(signatures(small()), signatures(other))
    assert said.startswith("replace at 1: ")


def test_what_is_read_makes_a_difference() -> None:
    other = small()
    other.calls[2] = replace(other.calls[2], arguments=(Slot(0),))
    assert list(differences(signatures(small()), signatures(other)))


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_nothing_is_said_of_equals_and_something_of_others(first: list, second: list) -> None:
    assert bool(list(differences(first, second))) == (first != second)


def test_long_differences_are_cut() -> None:
    (said,) = differences([], list(range(100, 200)))
    assert said.count(",") == LISTED - 1
    assert "100" in said
    assert "199" not in said
