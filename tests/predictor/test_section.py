"""Sections read, check, write and document themselves by their fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

import pytest

from predictor.document import Problems, parse_yaml
from predictor.errors import InputError
from predictor.section import (
    NOT_EMPTY,
    NOT_IN_FILE,
    Count,
    Name,
    Section,
    as_data,
    check,
    form,
    keys_of,
    named,
    real,
)


@dataclass(frozen=True)
class Round(Section):
    """A shape."""

    tag = "round"

    radius: Annotated[float, real(0, 10)]
    """The radius in m."""


@dataclass(frozen=True, kw_only=True)
class Box(Section):
    """Settings that all have."""

    weight: Annotated[float, real(0, 1)] = 0.5
    """Share of
    the load."""


@dataclass(frozen=True)
class Parcel(Box):
    """A parcel."""

    name: Name
    """The parcel's name."""
    inside: Annotated[tuple[Count, ...], NOT_EMPTY]
    shape: Annotated[str | Round, form("flat, {round: {radius: 1}}", {"flat": "flat"}, [Round])] = (
        "flat"
    )
    lid: Annotated[Count, named("cover")] = 1
    seen: Annotated[int, NOT_IN_FILE] = 0
    parts: tuple[Box, ...] = field(default=())

    def refuse_contradictions(self) -> None:
        if self.lid > 5 and self.shape == "flat":
            raise InputError("a flat one has five at most")


def read(text: str) -> tuple[Parcel | None, list[str]]:
    problems = Problems("f")
    parcel = check(Parcel, parse_yaml(text, problems), (), problems)
    try:
        problems.raise_if_any()
    except InputError as error:
        return parcel, [line.strip() for line in str(error).splitlines()]
    return parcel, []


def test_a_section_is_written_as_what_it_is_read_from() -> None:
    text = "{name: a, inside: [1], shape: {round: {radius: 2}}, cover: 3, parts: [{weight: 1}, {}]}"
    parcel, problems = read(text)
    assert not problems
    assert parcel == Parcel("a", (1,), Round(2.0), 3, 0, (Box(weight=1.0), Box()))
    assert as_data(parcel) == parse_yaml(text, Problems("f"))
    plain = Parcel("a", (1,), seen=4)
    assert as_data(plain) == {"name": "a", "inside": [1]}
    assert as_data(plain, full=True, leave_out=("name", "parts")) == {
        "inside": [1],
        "shape": "flat",
        "cover": 1,
        "weight": 0.5,
    }


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{inside: [1]}", "f:1: name: missing; give the parcel's name"),
        ("{name: a, inside: []}", "f:1: inside: got an empty list; give at least one"),
        ("{name: a, inside: [1], seen: 2}", "f:1: seen: unknown key"),
        ("{name: a, inside: [1], lid: 2}", "f:1: lid: unknown key"),
        ("{name: a, inside: [1], wieght: 1}", "did you mean 'weight'"),
        ("{name: a, inside: [1], shape: {round: {radius: 20}}}", "f:1: shape.round.radius: got 20"),
        ("{name: a, inside: [1], shape: {round: {}}}", "radius: missing; give the radius in m"),
        ("{name: a, inside: [1], parts: [{weight: -1}]}", "f:1: parts[0].weight: got -1"),
        ("{name: a, inside: [1], cover: 6}", "a flat one has five at most"),
        ("[1]", "must be a mapping with name, inside, shape, cover, parts, weight"),
    ],
)
def test_a_problem_names_place_key_and_what_is_allowed(text: str, problem: str) -> None:
    parcel, problems = read(text)
    assert parcel is None
    assert len(problems) == 1
    assert problem in problems[0]


def test_all_problems_are_told_at_once() -> None:
    text = "name: 1\ninside: 2\nshape:\n  round:\n    radius: 99\nweight: 3\n"
    _, (first, *problems) = read(text)
    assert first == "f: 4 problems"
    assert [line.split(":")[1] for line in problems] == ["1", "2", "5", "6"]


def test_keys_say_what_they_are() -> None:
    keys = keys_of(Parcel)
    assert keys["weight"].about == "Share of the load."
    assert keys["weight"].allowed == "number from 0 to 1"
    assert keys["inside"].allowed == "list: whole number, 1 to 10^9"
    assert keys["shape"].allowed == "flat, {round: {radius: 1}}"
    assert [name for name, key in keys.items() if key.required] == ["name", "inside"]
