"""docs/json.md: every key that ``--json`` prints, from the objects that the commands draw."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from lab.pages.tables import table_head
from shardopt.api.document import (
    AdviceAnswer,
    ExplainAnswer,
    MachinesAnswer,
    PlanAnswer,
    PredictAnswer,
    TuneAnswer,
)
from shardopt.api.json_object import JsonObject
from shardopt.report.bench.planners import PlannersAnswer
from shardopt.report.bench.run import RunAnswer
from shardopt.report.diff import DiffAnswer
from shardopt.report.stats import StatsAnswer, WindowsAnswer
from shardopt.report.trace import TraceAnswer

HEAD = """# Keys of `--json`

Made by `python -m lab pages` from the answers of the commands; do not edit this page. A key's name
has its unit: `_ms`, `_bytes`; shares and gains are fractions of one. A number that is not known is
null. A key marked *optional* is left out where it does not apply.
"""
ANSWERS = (
    *(PlanAnswer, AdviceAnswer, TuneAnswer, MachinesAnswer, PredictAnswer, ExplainAnswer),
    *(DiffAnswer, TraceAnswer, StatsAnswer, WindowsAnswer, RunAnswer, PlannersAnswer),
)
SIMPLE = {float: "number", int: "integer", str: "text", bool: "true or false", NoneType: "null"}


def json_text() -> str:
    """Return the page: the commands, then the objects within their answers."""
    waiting: list[type[JsonObject]] = [*ANSWERS]
    lines = [HEAD]
    for kind in waiting:  # grows while objects name others
        lines += _chapter(kind)
        for other in (*_bases(kind), *_objects(kind)):
            if other not in waiting:
                waiting.append(other)
    return "\n".join(lines) + "\n"


def _chapter(kind: type[JsonObject]) -> Iterator[str]:
    """Yield the heading of an object, what it shares with others, and a row for each own key."""
    yield f"## {kind.__name__}\n"
    first = (inspect.getdoc(kind) or "").replace("``", "`")
    shared = [_link(base) for base in _bases(kind)]
    also = f" With the keys of {', '.join(shared)}." if shared else ""
    yield f"{first.splitlines()[0]}{also}\n"
    rows = [
        f"| `{field.alias or name}` | {_words(field.annotation)} | {_meaning(field)} |"
        for name, field in kind.model_fields.items()
        if name in kind.__annotations__ and not field.exclude
    ]
    if rows:
        yield from table_head("key", "type", "meaning")
        yield from rows
        yield ""


def _meaning(field: Any) -> str:
    text = (field.description or "").replace("``", "`").replace("|", "\\|")
    return text if field.is_required() else f"*Optional.* {text}".rstrip()


def _bases(kind: type[JsonObject]) -> list[type[JsonObject]]:
    return [b for b in kind.__bases__ if issubclass(b, JsonObject) and b is not JsonObject]


def _objects(kind: type[JsonObject]) -> list[type[JsonObject]]:
    """List the objects that the keys of another hold."""
    fields = [field.annotation for field in kind.model_fields.values() if not field.exclude]
    return [part for field in fields for part in _parts(field) if _is_object(part)]


def _parts(kind: Any) -> Iterator[Any]:
    yield kind
    for part in get_args(kind):
        yield from _parts(part)


def _is_object(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, JsonObject)


def _link(kind: type) -> str:
    return f"[{kind.__name__}](#{kind.__name__.lower()})"


def _words(kind: Any) -> str:
    """Name a type as JSON has it."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _words(args[0])
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_words, args)))
    if origin in (list, tuple):
        inner = dict.fromkeys(_words(arg) for arg in args if arg is not ...)
        return f"list of {', '.join(inner)}"
    if _is_object(kind):
        return _link(kind)
    if origin is dict and _is_object(args[1]):
        return f"object of {_words(args[1])}"
    if origin is dict or is_dataclass(kind):
        return "object"
    return SIMPLE.get(kind, "any")
