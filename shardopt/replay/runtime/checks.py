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


def _bad(key: str, what: str) -> NoReturn:
    raise BadDataError(f"`{key}` must be {what}" if key else f"it must be {what}")


def whole(value: Any, key: str) -> None:
    """A whole number from 0."""
    if type(value) is not int or value < 0:
        _bad(key, f"a whole number from 0, not {json.dumps(value):.40}")


def number(value: Any, key: str) -> None:
    """Any number, or none."""
    if value is not None and not isinstance(value, (int, float)):
        _bad(key, f"a number, not {json.dumps(value):.40}")


def text(value: Any, key: str) -> None:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        _bad(key, f"a text, not {json.dumps(value):.40}")


def anything(_: Any, key: str) -> None:
    """No demand."""


def several(check: Check) -> Check:
    """A list of such."""

    def run(value: Any, key: str) -> None:
        if not isinstance(value, list):
            _bad(key, f"a list, not {json.dumps(value):.40}")
        for at, item in enumerate(value):
            check(item, f"{key}[{at}]")

    return run


def members(needed: dict[str, Check], others: dict[str, Check] | None = None) -> Check:
    """An object with these members; others may be missing."""

    def run(value: Any, key: str) -> None:
        if not isinstance(value, dict):
            _bad(key, f"an object, not {json.dumps(value):.40}")
        place = f"{key}." if key else ""
        for name, check in needed.items():
            if name not in value:
                raise BadDataError(f"`{place}{name}` is missing")
            check(value[name], place + name)
        for name, check in (others or {}).items():
            if name in value:
                check(value[name], place + name)

    return run


def _dtype(value: Any, key: str) -> None:
    if not isinstance(value, str) or not isinstance(getattr(torch, value, None), torch.dtype):
        _bad(key, f"a dtype of torch, such as float32, not {json.dumps(value):.40}")


def _tensor(value: Any, key: str) -> None:
    members(
        {"shape": several(whole), "strides": several(whole), "dtype": _dtype, "storage": whole},
        {"offset": whole, "fill": members({"kind": text})},
    )(value, key)
    if len(value["shape"]) != len(value["strides"]):
        _bad(f"{key}.strides", f"{len(value['shape'])} numbers, one a dimension of the shape")


def _tensors(value: Any, key: str) -> None:
    if not isinstance(value, dict):
        _bad(key, "an object")
    for name, spec in value.items():
        if not name.isdecimal():
            _bad(key, f"an object of tensors by number, not by {name!r:.20}")
        _tensor(spec, f"{key}.{name}")


_COMMON = members(
    {"schema": text, "ranks": several(whole), "world_size": whole, "indices": text},
)
_RANK = members(
    {
        "rank": whole,
        "program": text,
        "parts": several(several(whole)),
        "tensors": whole,
        "c": several(number),
        "groups": several(several(whole)),
        "made": _tensors,
        "calls": several(
            members(
                {"op": text},
                {
                    "overload": anything,
                    "arguments": several(anything),
                    "keywords": members({}),
                    "targets": several(anything),
                    "frees": several(whole),
                    "waits": several(whole),
                    "reads": several(whole),
                    "gives": several(whole),
                    "outputs": several(anything),
                    "us": number,
                    "bytes": whole,
                },
            )
        ),
        "left_out": several(members({"op": text, "reason": text, "us": number})),
    }
)


def common_data(value: Any, key: str) -> None:
    """Of data.json."""
    _COMMON(value, key)
    if not value["ranks"]:
        _bad("ranks", "a list of the ranks that were traced, not empty")


def rank_data(value: Any, key: str) -> None:
    """Of a rank's file: its members, and that its numbers point into its lists."""
    _RANK(value, key)
    count, calls = value["tensors"], len(value["calls"])
    for number_ in value["made"]:
        _below(int(number_), count, f"made.{number_}", "`tensors`")
    for at, call in enumerate(value["calls"]):
        for side in ("reads", "gives"):
            for number_ in call.get(side, ()):
                _below(number_, count, f"calls[{at}].{side}", "`tensors`")
    for at, part in enumerate(value["parts"]):
        if len(part) != 2 or not part[0] <= part[1] <= calls:
            _bad(f"parts[{at}]", f"the first call of a part and the one after its last, of {calls}")


def _below(value: int, limit: int, key: str, what: str) -> None:
    if value >= limit:
        raise BadDataError(f"`{key}` names tensor {value}, but {what} is {limit}")


def parts_of(iteration: Sequence[Any], mine: dict[str, Any]) -> list[Any]:
    """The functions of a program with the calls that each has."""
    if len(iteration) != len(mine["parts"]):
        refuse(
            f"{mine['program']}: has {len(iteration)} parts, the rank's `parts` "
            f"{len(mine['parts'])}; generate the benchmark again"
        )
    return list(zip(iteration, mine["parts"], strict=True))
