"""The ops file of a captured module, schema ``shardopt.ops/1``: reading and writing.

JSON with an event on each line. A tensor is a text: the number of its storage, its type, its
shape, and where they are not plain, strides and offset in elements, as in
``12 fp32[B, 64] strides[1, B] offset 128``; sizes are those of
`predictor.model.captured.dense`.
The file holds no values, no paths and no names but those of ops, embedding modules and features.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from predictor.document import shown
from predictor.errors import InputError
from predictor.model.captured.dense import (
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
from shardopt.files import decode, read_bytes

SCHEMA = "shardopt.ops/1"
PARTS = ("forward", "backward", "optimizer")
MOST_EVENTS = 2_000_000
MOST_AXES = 32
Features = Mapping[str, tuple[str, ...]]
Keys = tuple[tuple[str, str], ...]
_TENSOR = re.compile(
    r"(\d{1,9}) ([a-z0-9]{1,12})\[([^][]{0,1000})\]"
    r"(?: strides\[([^][]{0,1000})\])?(?: offset ([^][]{1,200}))?"
)
_NAME = re.compile(r"[\w.:/@-]{0,300}")
_IDS = re.compile(r"n\d{1,9}")


def ops_text(captured: CapturedProgram) -> str:
    """The file that `read_ops` reads as this program."""
    head: dict[str, Any] = {
        "schema": SCHEMA,
        "module": captured.module,
        "batch_size": captured.batch_size,
        "scales": captured.scales,
        "loss": captured.loss,
        "in_features": captured.in_features,
        "features": {module: list(names) for module, names in captured.features.items()},
        "ids": {name: [list(key) for key in keys] for name, keys in captured.ids.items()},
        "tied_ids": dict(captured.tied_ids),
        "optimizer_name": captured.optimizer_name,
        "state_bytes": captured.state_bytes,
    }
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
    found: dict[str, Any] = {str(event.kind): event.name}
    if event.inputs:
        found["in"] = list(map(_tensor_text, event.inputs))
    if event.outputs:
        found["out"] = list(map(_tensor_text, event.outputs))
    if event.freed:
        found["frees"] = list(event.freed)
    return {**found, "mutates": True} if event.mutates else found


def _tensor_text(of: SizedOperand) -> str:
    text = f"{of.storage} {of.data_type}[{', '.join(map(str, of.shape))}]"
    if of.strides is not None:
        text += f" strides[{', '.join(map(str, of.strides))}]"
    return text if of.offset == 0 else f"{text} offset {of.offset}"


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
        raw = json.loads(decode(content, name))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: not JSON: {error}; run to_yaml again") from None
    digest = hashlib.sha256(content).hexdigest()
    return _Reader(name).program(raw, digest)


def _pairs(given: Any) -> Keys | None:
    if not isinstance(given, list):
        return None
    good = all(isinstance(p, list) and [type(part) for part in p] == [str, str] for p in given)
    return tuple((pair[0], pair[1]) for pair in given) if good else None


class _Reader:
    """Checks one file; keeps tensors of one text once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.tensors: dict[str, SizedOperand] = {}
        self.names: set[str] = set()
        self.storages = 0
        self.freed: set[int] = set()

    def program(self, raw: Any, digest: str) -> CapturedProgram:
        """The file's content as a program."""
        if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
            given = raw.get("schema") if isinstance(raw, dict) else raw
            raise InputError(
                f"{self.name}: schema: got {shown(given)}; this shardopt reads '{SCHEMA}': give "
                "the ops file that to_yaml wrote, or run to_yaml again"
            )
        features = self._features(raw)
        ids = self._ids(raw, features)
        self.names = {BATCH, *ids}
        storages = tuple(
            self._size(size, f"storages[{at}]")
            for at, size in enumerate(self._list(raw, "storages"))
        )
        self.storages = len(storages)
        resident = self._tensors(self._list(raw, "resident"), "resident")
        parts = {part: tuple(self._events(raw, part)) for part in PARTS}
        return CapturedProgram(
            module=self._text(raw, "module"),
            batch_size=self._whole(raw, "batch_size", 1),
            scales=self._flag(raw, "scales"),
            features=features,
            ids=ids,
            storages=storages,
            resident=resident,
            optimizer_name=self._text(raw, "optimizer_name"),
            state_bytes=self._whole(raw, "state_bytes", 0),
            loss=self._text(raw, "loss"),
            in_features=self._whole(raw, "in_features", 0),
            tied_ids=self._tied_ids(raw),
            digest=digest,
            **parts,
        )

    def _refuse(self, key: str, given: object, allowed: str) -> InputError:
        return InputError(
            f"{self.name}: {key}: got {shown(given)}; it must be {allowed}: the file is damaged or "
            "was changed, run to_yaml again"
        )

    def _value(self, raw: Mapping[str, Any], key: str, kind: type, allowed: str) -> Any:
        value = raw.get(key)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self._refuse(key, value, allowed)
        return value

    def _list(self, raw: Mapping[str, Any], key: str) -> list[Any]:
        found: list[Any] = self._value(raw, key, list, "a list")
        if len(found) > MOST_EVENTS:
            raise self._refuse(key, f"{len(found)} entries", f"at most {MOST_EVENTS} entries")
        return found

    def _flag(self, raw: Mapping[str, Any], key: str) -> bool:
        return bool(self._value(raw, key, bool, "true or false"))

    def _text(self, raw: Mapping[str, Any], key: str) -> str:
        return str(self._value(raw, key, str, "a text"))[:300]

    def _whole(self, raw: Mapping[str, Any], key: str, least: int, where: str = "") -> int:
        what = f"a whole number from {least} to {MAX_VALUE}"
        value = raw.get(key)
        if type(value) is not int or not least <= value <= MAX_VALUE:
            raise self._refuse(where or key, value, what)
        return value

    def _features(self, raw: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
        given = self._value(raw, "features", dict, "a mapping of modules to their features")
        for module, names in given.items():
            if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
                raise self._refuse(f"features.{module}", names, "a list of features")
        return {module: tuple(names) for module, names in given.items()}

    def _ids(self, raw: Mapping[str, Any], features: Features) -> dict[str, Keys]:
        given = self._value(raw, "ids", dict, "a mapping of names to features")
        known = {(module, feature) for module, of in features.items() for feature in of}
        found = {}
        for name, keys in given.items():
            pairs = _pairs(keys)
            if pairs is None or not known.issuperset(pairs) or not _IDS.fullmatch(name):
                allowed = "n0, n1, ... with pairs of a module and one of its features"
                raise self._refuse(f"ids.{name}", keys, allowed)
            found[name] = pairs
        return found

    def _tied_ids(self, raw: Mapping[str, Any]) -> dict[str, float]:
        """None in files of versions that did not write them."""
        given = self._value({"tied_ids": {}, **raw}, "tied_ids", dict, "a mapping of features")
        for feature, mean in given.items():
            if type(mean) not in (int, float) or not 0 < mean < math.inf:
                raise self._refuse(f"tied_ids.{feature}", mean, "a number above 0")
        return dict(given)

    def _events(self, raw: Mapping[str, Any], part: str) -> Iterator[SizedEvent]:
        for at, event in enumerate(self._list(raw, part)):
            yield self._event(event, f"{part}[{at}]")

    def _event(self, raw: Any, where: str) -> SizedEvent:
        if not isinstance(raw, dict):
            raise self._refuse(where, raw, 'an event such as {"op": "mm", ...}')
        if "gradient" in raw:
            elements = self._whole(raw, "gradient", 0, f"{where}.gradient")
            item_bytes = self._whole(raw, "item_bytes", 1, f"{where}.item_bytes")
            return SizedEvent(EventKind.GRADIENT, "", elements=elements, item_bytes=item_bytes)
        kind = next((kind for kind in EventKind if kind in raw), None)
        name = raw.get(kind) if kind is not None else None
        if kind is None or not isinstance(name, str) or not _NAME.fullmatch(name):
            raise self._refuse(where, raw, "an op, lookup, lookup_backward or gradient with a name")
        return SizedEvent(
            kind,
            name,
            self._tensors(raw.get("in", []), f"{where}.in"),
            self._tensors(raw.get("out", []), f"{where}.out"),
            self._frees(raw.get("frees", []), f"{where}.frees"),
            raw.get("mutates", False) is True,
        )

    def _frees(self, given: Any, where: str) -> tuple[int, ...]:
        if not isinstance(given, list) or not all(
            type(n) is int and 0 <= n < self.storages for n in given
        ):
            raise self._refuse(where, given, f"a list of storages, 0 to {self.storages - 1}")
        if self.freed.intersection(given) or len(set(given)) < len(given):
            raise self._refuse(where, given, "a list of storages that are freed nowhere else")
        self.freed.update(given)
        return tuple(given)

    def _tensors(self, given: Any, where: str) -> tuple[SizedOperand, ...]:
        if not isinstance(given, list):
            raise self._refuse(where, given, "a list of tensors such as '12 fp32[B, 64]'")
        return tuple(self._tensor(text, f"{where}[{at}]") for at, text in enumerate(given))

    def _tensor(self, text: Any, where: str) -> SizedOperand:
        if isinstance(text, str) and text in self.tensors:
            return self.tensors[text]
        match = _TENSOR.fullmatch(text) if isinstance(text, str) else None
        if match is None or match[2] not in ITEM_BYTES:
            raise self._refuse(where, text, "a tensor such as '12 fp32[B, 64] strides[1, B]'")
        if int(match[1]) >= self.storages:
            raise self._refuse(where, text, f"in one of the {self.storages} storages")
        shape = self._sizes(match[3], where)
        strides = None if match[4] is None else self._sizes(match[4], where)
        if len(shape) > MOST_AXES or (strides is not None and len(strides) != len(shape)):
            raise self._refuse(
                where, text, f"a tensor of at most {MOST_AXES} axes and as many strides"
            )
        offset = self._size(_number(match[5] or "0"), where)
        found = SizedOperand(int(match[1]), match[2], shape, strides, offset)
        self.tensors[text] = found
        return found

    def _sizes(self, text: str, where: str) -> tuple[Size, ...]:
        parts = [part.strip() for part in text.split(",")] if text.strip() else []
        return tuple(self._size(_number(part), where) for part in parts)

    def _size(self, given: Any, where: str) -> Size:
        if type(given) is int and 0 <= given <= MAX_VALUE:
            return given
        if not isinstance(given, str):
            raise self._refuse(where, given, "a size, such as 64 or '64*B'")
        try:
            unknown = parse_size(given).names - self.names
        except InputError as error:
            raise InputError(f"{self.name}: {where}: {error}") from None
        if unknown:
            raise self._refuse(where, given, f"of {', '.join(sorted(self.names))}")
        return given


def _number(text: str) -> Size:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else text


def other_model(captured: CapturedProgram, features: Mapping[str, Sequence[str]]) -> str | None:
    """How the embedding modules of a model differ from those of the captured one; None if not.

    Args:
        features: of each embedding module of the model file.
    """
    for module in sorted({*captured.features, *features}):
        ours, theirs = set(features.get(module, ())), set(captured.features.get(module, ()))
        if ours != theirs:
            odd = ", ".join(sorted(ours ^ theirs)[:5])
            return (
                f"the ops are of another model: embedding module '{module}' has {len(ours)} "
                f"features here and {len(theirs)} there; these differ: {odd}"
            )
    return None
