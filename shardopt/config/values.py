"""The kinds of values that configuration keys take, each with an error that says what is allowed.

YAML 1.1 reads ``1e6`` as text and ``40_000_000`` as a number, so text that is a decimal number
counts as one; a boolean never does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from predictor.document import shown
from predictor.errors import did_you_mean

_DECIMAL = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]{1,4})?\Z")
_LONGEST = 300

SPELLINGS = {
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "tf32x3": "tf32",
    "tensorfloat32": "tf32",
    "tw": "table_wise",
    "cw": "column_wise",
    "rw": "row_wise",
    "dp": "data_parallel",
    "twrw": "table_row_wise",
    "twcw": "table_column_wise",
    "grid": "grid_shard",
    "adagrad": "exact_adagrad",
    "rowwise_adagrad": "exact_row_wise_adagrad",
    "row_wise_adagrad": "exact_row_wise_adagrad",
    "cat": "concat",
    "dcn": "dcn_v2",
    "dcnv2": "dcn_v2",
}
"""Other names people know the values by; a hint, never accepted in silence."""


def refuse(value: object, rule: str) -> PydanticCustomError:
    """The error of a value that breaks ``rule``, a sentence that starts with a verb."""
    return PydanticCustomError("shardopt", "{text}", {"text": f"got {shown(value)}; {rule}"})


def nearest(given: str, allowed: Iterable[str]) -> str:
    """``did_you_mean`` that also knows other spellings."""
    names = list(allowed)
    known = SPELLINGS.get(given.lower())
    if known in names:
        return f" (did you mean '{known}'?)"
    return did_you_mean(given, names)


def as_number(value: object) -> float | int | None:
    """A finite number from a number or decimal text; None for anything else, booleans too."""
    if isinstance(value, str) and len(value) <= _LONGEST and _DECIMAL.match(value.strip()):
        text = value.strip().replace("_", "")
        value = int(text) if text.lstrip("+-").isdigit() else float(text)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if isinstance(value, int) or math.isfinite(value) else None


def whole(minimum: int, maximum: int, *, multiple_of: int = 1, why: str = "") -> BeforeValidator:
    """An integer of ``minimum..maximum``; integral floats and scientific notation count."""

    def check(value: object) -> int:
        number = as_number(value)
        if number is None or number != int(number):
            raise refuse(value, f"it must be a whole number, at least {minimum}")
        if not minimum <= number <= maximum:
            raise refuse(value, f"it must be at least {minimum} and at most {maximum}")
        if int(number) % multiple_of:
            below = int(number) // multiple_of * multiple_of
            near = [str(n) for n in (below, below + multiple_of) if n >= minimum]
            raise refuse(
                value, f"it must be a multiple of {multiple_of}{why}; try {' or '.join(near)}"
            )
        return int(number)

    return BeforeValidator(check)


def real(low: float, high: float, *, above: bool = False) -> BeforeValidator:
    """A number of ``low..high``, both included unless ``above`` leaves out the lower one."""
    words = f"{'more than' if above else 'at least'} {low:g} and at most {high:g}"

    def check(value: object) -> float:
        number = as_number(value)
        if number is None or not low <= number <= high or (above and number == low):
            raise refuse(value, f"it must be a number, {words}")
        return float(number)

    return BeforeValidator(check)


def choice(allowed: Iterable[str]) -> BeforeValidator:
    """One of some words."""
    names = [str(name) for name in allowed]

    def check(value: object) -> str:
        if isinstance(value, str) and value in names:
            return value
        hint = nearest(value, names) if isinstance(value, str) else ""
        raise refuse(value, f"allowed: {', '.join(names)}{hint}")

    return BeforeValidator(check)


def text(*, forbidden: Mapping[str, str] | None = None) -> BeforeValidator:
    """Non-empty text.

    Args:
        forbidden: characters that must not occur, each with the reason.
    """

    def check(value: object) -> str:
        if not isinstance(value, str):
            raise refuse(value, f"it must be text; {_text_hint(value)}")
        if not value.strip():
            raise refuse(value, "it must not be empty")
        for letter, why in (forbidden or {}).items():
            if letter in value:
                raise refuse(value, f"it must not contain '{letter}': {why}")
        return value

    return BeforeValidator(check)


def _text_hint(value: object) -> str:
    if isinstance(value, bool):
        return "YAML reads yes, no, on, off, true, false as booleans unless they stand in quotes"
    if isinstance(value, int | float):
        return f'write it in quotes: "{value}"'
    return "give one word"


def flag() -> BeforeValidator:
    """``true`` or ``false``."""

    def check(value: object) -> Any:
        if isinstance(value, bool):
            return value
        raise refuse(value, "allowed: true, false")

    return BeforeValidator(check)
