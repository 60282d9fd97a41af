"""The ops file of a captured module, schema ``shardopt.ops/1``: reading and writing.

JSON with an event on each line. A tensor is a text: the number of its storage, its type, its
shape, and where they are not plain, strides and offset in elements, as in
``12 fp32[B, 64] strides[1, B] offset 128``; sizes are those of
`predictor.model.captured`.
The file holds no values, no file names and no names but those of ops, modules and features.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from predictor.document import key_text, shown
from predictor.errors import InputError
from predictor.model.captured import (
    BATCH,
    ITEM_BYTES,
    MAX_VALUE,
    CapturedProgram,
    EventKind,
    Size,
    SizedEvent,
    SizedOperand,
    parse_size,
)
from shardopt.files import read_bytes

SCHEMA = "shardopt.ops/1"
HEAD = (
    *("module", "batch_size", "scales", "loss", "in_features", "features", "ids", "tied_ids"),
    *("optimizer_name", "state_bytes"),
)
"""Keys that are as the program has them, in the order of the file."""
PARTS = ("forward", "backward", "optimizer")
MOST_EVENTS = 2_000_000
MOST_AXES = 32
_TENSOR = re.compile(
    r"(\d{1,9}) ([a-z0-9]{1,12})\[([^][]{0,1000})\]"
    r"(?: strides\[([^][]{0,1000})\])?(?: offset ([^][]{1,200}))?"
)
_IDS = re.compile(r"n\d{1,9}")


def ops_text(captured: CapturedProgram) -> str:
    """The file that `read_ops` reads as this program."""
    head = {"schema": SCHEMA, **{name: getattr(captured, name) for name in HEAD}}
    lists: dict[str, list[Any]] = {
        "storages": list(captured.storages),
        "resident": [_tensor_text(operand) for operand in captured.resident],
        **{part: list(map(_event_json, getattr(captured, part))) for part in PARTS},
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
    for key, values in lists.items():
        joined = ",\n".join(f"    {json.dumps(value)}" for value in values)
        lines.append(f"  {json.dumps(key)}: [\n{joined}\n  ]" if values else f'  "{key}": []')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _event_json(event: SizedEvent) -> dict[str, Any]:
    if event.kind is EventKind.GRADIENT:
        return {"gradient": event.elements, "item_bytes": event.item_bytes}
    keys: dict[str, Any] = {str(event.kind): event.name}
    if event.inputs:
        keys["in"] = list(map(_tensor_text, event.inputs))
    if event.outputs:
        keys["out"] = list(map(_tensor_text, event.outputs))
    if event.freed:
        keys["frees"] = list(event.freed)
    if event.path:
        keys["path"] = event.path
    return {**keys, "mutates": True} if event.mutates else keys


def _tensor_text(operand: SizedOperand) -> str:
    text = f"{operand.storage} {operand.data_type}[{', '.join(map(str, operand.shape))}]"
    if operand.strides is not None:
        text += f" strides[{', '.join(map(str, operand.strides))}]"
    return text if operand.offset == 0 else f"{text} offset {operand.offset}"


def with_ops_digest(captured: CapturedProgram) -> CapturedProgram:
    """The program with the digest that a reader of its file finds."""
    return replace(captured, digest=hashlib.sha256(ops_text(captured).encode("utf-8")).hexdigest())


def read_ops(path: Path) -> tuple[CapturedProgram, bytes]:
    """The program of an ops file, and the file's content.

    Raises:
        InputError: it cannot be read or is none; names file and key.
    """
    content = read_bytes(path, "ops file")
    return read_ops_content(content, str(path)), content


def read_ops_content(content: bytes, name: str) -> CapturedProgram:
    """The program that an ops file holds.

    Args:
        name: of the file, for errors.

    Raises:
        InputError: it is none; names the key.
    """
    try:
        file = _OpsFile.model_validate_json(content.removeprefix(b"\xef\xbb\xbf"))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "json_invalid":
            raise InputError(f"{name}: {first['msg']}; run to_yaml again") from None
        raise _damaged(name, key_text(first["loc"]), first["input"], first["msg"]) from None
    return _Reader(name, file).program(hashlib.sha256(content).hexdigest())


def _damaged(name: str, where: str, value: object, rule: str) -> InputError:
    return InputError(
        f"{name}: {where}: got {shown(value)}; {rule}: give the ops file that to_yaml wrote, or "
        "run to_yaml again"
    )


Whole = Annotated[int, Field(ge=0, le=MAX_VALUE)]
Positive = Annotated[int, Field(ge=1, le=MAX_VALUE)]
Name = Annotated[str, Field(pattern=r"^[\w.:/@-]*$", max_length=300)]


Text = Annotated[str, AfterValidator(lambda text: text[:300])]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True)


class _Event(_Strict):
    op: Name | None = None
    lookup: Name | None = None
    lookup_backward: Name | None = None
    gradient: Whole | None = None
    item_bytes: Positive = 4
    inputs: list[str] = Field(alias="in", default=[])
    outputs: list[str] = Field(alias="out", default=[])
    frees: list[int] = []
    mutates: bool = False
    path: Name = ""


Events = Annotated[list[_Event], Field(max_length=MOST_EVENTS)]


class _OpsFile(_Strict):
    """The file; files of versions that did not write ``tied_ids`` have none."""

    schema_: Literal["shardopt.ops/1"] = Field(alias="schema")
    module: Text
    batch_size: Positive
    scales: bool
    loss: Text
    in_features: Whole
    features: dict[str, tuple[str, ...]]
    ids: dict[str, tuple[tuple[str, str], ...]]
    tied_ids: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = {}
    optimizer_name: Text
    state_bytes: Whole
    storages: Annotated[list[Any], Field(max_length=MOST_EVENTS)]
    resident: Annotated[list[str], Field(max_length=MOST_EVENTS)]
    forward: Events
    backward: Events
    optimizer: Events


class _Reader:
    """Checks what tensors, sizes and frees of a file say; keeps tensors of one text once."""

    def __init__(self, name: str, file: _OpsFile) -> None:
        self.name = name
        self.file = file
        self.tensors: dict[str, SizedOperand] = {}
        self.names = {BATCH, *file.ids}
        self.storages = len(file.storages)
        self.freed: set[int] = set()

    def program(self, digest: str) -> CapturedProgram:
        file = self.file
        read = {
            (module, feature) for module, features in file.features.items() for feature in features
        }
        for name, pairs in file.ids.items():
            if not read.issuperset(pairs) or not _IDS.fullmatch(name):
                allowed = "names are n0, n1, ... with pairs of a module and one of its features"
                raise self._refuse(f"ids.{name}", [list(pair) for pair in pairs], allowed)
        sizes = (self._size(size, f"storages[{at}]") for at, size in enumerate(file.storages))
        parts: dict[str, Any] = {name: getattr(file, name) for name in HEAD}
        storages, resident = tuple(sizes), self._tensors(file.resident, "resident")
        for part in PARTS:
            events = enumerate(getattr(file, part))
            parts[part] = tuple(self._event(event, f"{part}[{at}]") for at, event in events)
        return CapturedProgram(storages=storages, resident=resident, digest=digest, **parts)

    def _refuse(self, where: str, value: object, rule: str) -> InputError:
        return _damaged(self.name, where, value, rule)

    def _event(self, event: _Event, where: str) -> SizedEvent:
        if event.gradient is not None:
            return SizedEvent(
                EventKind.GRADIENT, "", elements=event.gradient, item_bytes=event.item_bytes
            )
        kinds = (EventKind.OP, EventKind.LOOKUP, EventKind.LOOKUP_BACKWARD)
        kind = next((kind for kind in kinds if getattr(event, str(kind)) is not None), None)
        if kind is None:
            rule = "it must be an op, lookup, lookup_backward or gradient"
            raise self._refuse(where, event, rule)
        inputs = self._tensors(event.inputs, f"{where}.in")
        outputs = self._tensors(event.outputs, f"{where}.out")
        frees = event.frees
        if not all(0 <= n < self.storages for n in frees):
            raise self._refuse(f"{where}.frees", frees, f"storages are 0 to {self.storages - 1}")
        if self.freed.intersection(frees) or len(set(frees)) < len(frees):
            raise self._refuse(f"{where}.frees", frees, "a storage is freed only once")
        self.freed.update(frees)
        name = getattr(event, str(kind))
        return SizedEvent(kind, name, inputs, outputs, tuple(frees), event.mutates, path=event.path)

    def _tensors(self, texts: Sequence[str], where: str) -> tuple[SizedOperand, ...]:
        return tuple(self._tensor(text, f"{where}[{at}]") for at, text in enumerate(texts))

    def _tensor(self, text: str, where: str) -> SizedOperand:
        if text in self.tensors:
            return self.tensors[text]
        match = _TENSOR.fullmatch(text)
        if match is None or match[2] not in ITEM_BYTES:
            raise self._refuse(where, text, "a tensor is like '12 fp32[B, 64] strides[1, B]'")
        if int(match[1]) >= self.storages:
            raise self._refuse(where, text, f"it lies in one of the {self.storages} storages")
        shape = self._sizes(match[3], where)
        strides = None if match[4] is None else self._sizes(match[4], where)
        if len(shape) > MOST_AXES or (strides is not None and len(strides) != len(shape)):
            rule = f"a tensor has at most {MOST_AXES} axes, each with a stride"
            raise self._refuse(where, text, rule)
        offset = self._size(_number(match[5] or "0"), where)
        operand = SizedOperand(int(match[1]), match[2], shape, strides, offset)
        self.tensors[text] = operand
        return operand

    def _sizes(self, text: str, where: str) -> tuple[Size, ...]:
        parts = text.split(",") if text.strip() else []
        return tuple(self._size(_number(part.strip()), where) for part in parts)

    def _size(self, value: Any, where: str) -> Size:
        if type(value) is int and 0 <= value <= MAX_VALUE:
            return value
        if not isinstance(value, str):
            raise self._refuse(where, value, "a size is like 64 or '64*B'")
        try:
            unknown = parse_size(value).names - self.names
        except InputError as error:
            raise InputError(f"{self.name}: {where}: {error}") from None
        if unknown:
            raise self._refuse(where, value, f"sizes may use {', '.join(sorted(self.names))}")
        return value


def _number(text: str) -> Size:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else text


def other_model(captured: CapturedProgram, features: Mapping[str, Sequence[str]]) -> str | None:
    """Say how the embedding modules of a model differ from the captured ones; None if not.

    Args:
        features: of each embedding module of the model file.
    """
    for module in sorted({*captured.features, *features}):
        ours, theirs = set(features.get(module, ())), set(captured.features.get(module, ()))
        if ours != theirs:
            odd = ", ".join(sorted(ours ^ theirs)[:5])
            return (
                f"the ops belong to another model: embedding module '{module}' has {len(ours)} "
                f"features here and {len(theirs)} there; these differ: {odd}"
            )
    return None
