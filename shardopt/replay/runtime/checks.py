"""Reads a benchmark's data files; what was cut off or edited wrongly is named by file and key."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch

REFUSED = 2
"""Exit code of a rank that says what is wrong with what it was given."""

LOST = 3
"""Exit code of a rank that an error ended which another rank may have caused."""

Check = Callable[[Any, str], None]


class BadDataError(Exception):
    """Names the key, and says what it must be."""


def refuse(message: str, code: int = REFUSED) -> NoReturn:
    """End this rank with a message instead of a traceback."""
    print(message, file=sys.stderr, flush=True)
    raise SystemExit(code)


def read(path: Path, check: Check) -> dict[str, Any]:
    """A data file of the benchmark; ends this rank if it cannot be used."""
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        check(data, "")
    except OSError as error:
        refuse(f"{path.name}: cannot be read: {error.strerror}; generate the benchmark again")
    except ValueError as error:
        refuse(f"{path.name}: is cut off or no JSON ({error}); generate the benchmark again")
    except BadDataError as error:
        refuse(f"{path.name}: {error}; mend it, or generate the benchmark again")
    return dict(data)


def _bad(key: str, what: str, value: Any = None) -> NoReturn:
    got = "" if value is None else f", not {json.dumps(value):.40}"
    raise BadDataError(f"`{key}` must be {what}{got}" if key else f"it must be {what}{got}")


def _whole(value: Any, key: str) -> None:
    if type(value) is not int or value < 0:
        _bad(key, "a whole number from 0", value)


def _number(value: Any, key: str) -> None:
    if value is not None and not isinstance(value, (int, float)):
        _bad(key, "a number", value)


def _text(value: Any, key: str) -> None:
    if not isinstance(value, str) or not value:
        _bad(key, "a text", value)


def _tensor(value: Any, key: str) -> None:
    _fits(value, _TENSOR, key)
    dtype = value["dtype"]
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        _bad(f"{key}.dtype", "a dtype of torch, such as float32", dtype)
    if len(value["shape"]) != len(value["strides"]):
        _bad(f"{key}.strides", f"{len(value['shape'])} numbers, one a dimension of the shape")


_TENSOR = {
    "shape": [_whole],
    "strides": [_whole],
    "dtype": _text,
    "storage": _whole,
    "offset?": _whole,
    "fill?": {"kind": _text},
}
_COMMON = {"schema": _text, "ranks": [_whole], "world_size": _whole, "indices": _text}
_RANK = {
    "rank": _whole,
    "program": _text,
    "parts": [[_whole]],
    "tensors": _whole,
    "c": [_number],
    "groups": [[_whole]],
    "made": {},
    "calls": [
        {
            "op": _text,
            "arguments?": [],
            "keywords?": {},
            "targets?": [],
            "frees?": [_whole],
            "waits?": [_whole],
            "reads?": [_whole],
            "gives?": [_whole],
            "outputs?": [],
            "us?": _number,
            "bytes?": _whole,
        }
    ],
    "left_out": [{"op": _text, "reason": _text, "us": _number}],
}
"""What the files hold: lists of such items (of anything if empty), objects of such members (``?``
marks one that may be missing), and checks."""


def _fits(value: Any, form: Any, key: str) -> None:
    """Refuse a value that has not the form."""
    if callable(form):
        form(value, key)
    elif isinstance(form, list):
        if not isinstance(value, list):
            _bad(key, "a list", value)
        for at, item in enumerate(value if form else ()):
            _fits(item, form[0], f"{key}[{at}]")
    else:
        if not isinstance(value, dict):
            _bad(key, "an object", value)
        for name, inner in form.items():
            plain = name.removesuffix("?")
            place = f"{key}.{plain}" if key else plain
            if plain in value:
                _fits(value[plain], inner, place)
            elif plain == name:
                raise BadDataError(f"`{place}` is missing")


def common_data(value: Any, key: str) -> None:
    """Of data.json."""
    _fits(value, _COMMON, key)
    if not value["ranks"]:
        _bad("ranks", "a list of the ranks that were traced, not empty")


def rank_data(value: Any, key: str) -> None:
    """Of a rank's file: its members, and that its numbers point into its lists."""
    _fits(value, _RANK, key)
    count, calls = value["tensors"], len(value["calls"])
    named: list[tuple[int, str]] = []
    for name, spec in value["made"].items():
        if not name.isdecimal():
            _bad("made", f"an object of tensors by number, not by {name!r:.20}")
        _tensor(spec, f"made.{name}")
        named.append((int(name), f"made.{name}"))
    for at, call in enumerate(value["calls"]):
        for side in ("reads", "gives"):
            named += [(number, f"calls[{at}].{side}") for number in call.get(side, ())]
    for number, place in named:
        if number >= count:
            raise BadDataError(f"`{place}` names tensor {number}, but `tensors` is {count}")
    for at, part in enumerate(value["parts"]):
        if len(part) != 2 or not part[0] <= part[1] <= calls:
            _bad(f"parts[{at}]", f"the first call of a part and the one after its last, of {calls}")


def parts_of(iteration: Sequence[Any], mine: dict[str, Any]) -> list[Any]:
    """The functions of a program with the calls that each has."""
    if len(iteration) != len(mine["parts"]):
        refuse(
            f"{mine['program']}: has {len(iteration)} parts, the rank's `parts` "
            f"{len(mine['parts'])}; generate the benchmark again"
        )
    return list(zip(iteration, mine["parts"], strict=True))
