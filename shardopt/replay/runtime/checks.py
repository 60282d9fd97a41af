"""Reads a benchmark's data files; what was cut off or edited wrongly is named by file and key."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

REFUSED = 2
"""Exit code of a rank that says what is wrong with what it was given."""

LOST = 3
"""Exit code of a rank that an error ended which another rank may have caused."""

COMMS = "c10d::"
TENSOR = re.compile(r"t\[(\d+)\]")
Check = Callable[[Any], None]


class BadDataError(Exception):
    """Names the key, and says what it must be."""


def number_of(argument: Any) -> int | None:
    """Of the tensor that an argument of a call is; None if it is none."""
    match = TENSOR.fullmatch(argument) if isinstance(argument, str) else None
    return None if match is None else int(match[1])


def refuse(message: str, code: int = REFUSED) -> NoReturn:
    """End this rank with a message instead of a traceback."""
    print(message, file=sys.stderr, flush=True)
    raise SystemExit(code)


def read(path: Path, check: Check) -> dict[str, Any]:
    """A data file of the benchmark; ends this rank if it cannot be used."""
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        check(data)
    except OSError as error:
        refuse(f"{path.name}: cannot be read: {error.strerror}; generate the benchmark again")
    except ValueError as error:
        refuse(f"{path.name}: is cut off or no JSON ({error}); generate the benchmark again")
    except BadDataError as error:
        refuse(f"{path.name}: {error}; mend it, or generate the benchmark again")
    return dict(data)


FORMS: dict[str, Callable[[Any], bool]] = {
    "a whole number from 0": lambda value: type(value) is int and value >= 0,
    "a number": lambda value: value is None or isinstance(value, (int, float)),
    "a text": lambda value: isinstance(value, str) and value != "",
    "a dtype of torch, such as float32": lambda value: (
        isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)
    ),
}
WHOLE, NUMBER, TEXT, DTYPE = FORMS
COMMON = {"schema": TEXT, "ranks": [WHOLE], "world_size": WHOLE, "indices": TEXT}
MADE = {
    "shape": [WHOLE],
    "strides": [WHOLE],
    "dtype": DTYPE,
    "storage": WHOLE,
    "offset?": WHOLE,
    "fill?": {"kind": TEXT},
}
CALL = {
    "op": TEXT,
    "arguments?": [],
    "keywords?": {},
    "targets?": [],
    "reads?": [WHOLE],
    "gives?": [WHOLE],
    "outputs?": [],
    "us?": NUMBER,
    "bytes?": WHOLE,
}
RANK = {
    "rank": WHOLE,
    "program": TEXT,
    "parts": [[WHOLE]],
    "tensors": WHOLE,
    "groups": [[WHOLE]],
    "made": {},
    "calls": [CALL],
    "left_out": [{"op": TEXT, "reason": TEXT, "us": NUMBER}],
}
"""What the files hold: lists of such items (of anything if empty), objects of such members (``?``
marks one that may be missing), and values of such `FORMS`."""


def _require(good: bool, key: str, what: str, value: Any = None) -> None:
    if not good:
        name = f"`{key}`" if key else "it"
        got = "" if value is None else f", not {json.dumps(value):.40}"
        raise BadDataError(f"{name} must be {what}{got}")


def _fits(value: Any, form: Any, key: str) -> None:
    """Refuse a value that has not the form."""
    if isinstance(form, str):
        _require(FORMS[form](value), key, form, value)
    elif isinstance(form, list):
        _require(isinstance(value, list), key, "a list", value)
        for at, item in enumerate(value if form else ()):
            _fits(item, form[0], f"{key}[{at}]")
    else:
        _require(isinstance(value, dict), key, "an object", value)
        for name, inner in form.items():
            plain = name.removesuffix("?")
            place = f"{key}.{plain}" if key else plain
            if plain in value:
                _fits(value[plain], inner, place)
            elif plain == name:
                raise BadDataError(f"`{place}` is missing")


def common_data(value: Any) -> None:
    """Of data.json."""
    _fits(value, COMMON, "")
    _require(bool(value["ranks"]), "ranks", "a list of the ranks that were traced, not empty")


def rank_data(value: Any) -> None:
    """Of a rank's file: its members, and that its numbers point into its lists."""
    _fits(value, RANK, "")
    count, calls = value["tensors"], len(value["calls"])
    named: list[tuple[int, str]] = []
    for name, spec in value["made"].items():
        _require(name.isdecimal(), "made", f"an object of tensors by number, not by {name!r:.20}")
        _fits(spec, MADE, f"made.{name}")
        dims = len(spec["shape"])
        fits = len(spec["strides"]) == dims
        _require(fits, f"made.{name}.strides", f"{dims} numbers, one a dimension of the shape")
        named.append((int(name), f"made.{name}"))
    for at, call in enumerate(value["calls"]):
        for side in ("reads", "gives"):
            named += [(number, f"calls[{at}].{side}") for number in call.get(side, ())]
    for number, place in named:
        if number >= count:
            raise BadDataError(f"`{place}` names tensor {number}, but `tensors` is {count}")
    for at, part in enumerate(value["parts"]):
        whole = len(part) == 2 and part[0] <= part[1] <= calls
        what = f"the first call of a part and the one after its last, of {calls}"
        _require(whole, f"parts[{at}]", what)


def parts_of(iteration: Sequence[Any], mine: dict[str, Any]) -> list[Any]:
    """The functions of a program with the calls that each has."""
    if len(iteration) != len(mine["parts"]):
        refuse(
            f"{mine['program']}: has {len(iteration)} parts, the rank's `parts` "
            f"{len(mine['parts'])}; generate the benchmark again"
        )
    return list(zip(iteration, mine["parts"], strict=True))
