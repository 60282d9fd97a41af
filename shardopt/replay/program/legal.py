"""Gives arguments that need legal whole numbers tensors that hold them."""

from __future__ import annotations

from typing import Any

from predictor.trace.execution import Node
from shardopt.replay.program.program import WHOLE, Call, Slot, slots
from shardopt.replay.program.schema import Schema
from shardopt.replay.program.tables import WEIGHTS, MatchedTables
from shardopt.replay.program.tensors import Tensors, TensorUse, tensors_of
from shardopt.replay.program.values import (
    CONSISTENT,
    IDS_ANYWHERE,
    LISTS,
    PASSING,
    Fill,
    is_lookup,
    roles_of,
)

CHECKS = "fbgemm::bounds_check_indices"
"""Writes to ids and offsets that are out of bounds alone; lookups write no whole numbers."""
POSITIVE = "positive"
SUMS = "fbgemm::asynchronous_complete_cumsum"
"""Makes offsets of lengths."""
IDS = frozenset({"ids", "table_ids", "rows"})
OF_TABLES = "table_offsets"
"""Shares of ids as a table summary has them, which no op before the lookup gives."""


class LegalValues:
    """Decides what tensors made up front hold.

    `fills` maps their numbers to it; what has none holds plain numbers or zeros. `pinned` counts
    those that stand in for a tensor that an op gives.

    Args:
        tables: that lookups read, where a summary of them is given.
    """

    def __init__(self, tensors: Tensors, tables: MatchedTables | None = None) -> None:
        self.tensors, self.tables = tensors, tables
        self.fills: dict[int, Fill] = {}
        self.pinned = 0
        self._instead: dict[int, int] = {}
        self._root: dict[int, int] = {}
        self._consistent: dict[int, bool] = {}
        self._overwritten: set[int] = set()
        self._lengths: dict[int, int] = {}

    def for_op(self, schema: Schema, node: Node) -> dict[str, Fill]:
        """Name of an argument (of items of lists ``name.i``) -> what it must hold."""
        named: dict[str, Any] = {}
        places: dict[str, str] = {}
        for parameter, argument in zip(schema.parameters, node.inputs, strict=False):
            found = tensors_of(argument) if "Tensor" in parameter.base else []
            shapes = [None if of is None else of.spec.shape for of in found]
            if not isinstance(argument.value, tuple) and found:
                named[parameter.name] = shapes[0]
            elif found:
                named[parameter.name] = shapes
                items = LISTS.get(parameter.name, {}).get(len(found), ())
                for i, name in enumerate(items):
                    named.setdefault(name, shapes[i])
                    places[name] = f"{parameter.name}.{i}"
            elif "Tensor" not in parameter.base:
                named[parameter.name] = argument.value
        if self.tables is not None and is_lookup(schema.name):
            named["tables"] = self.tables.of(schema.name, _weights(schema, node), named)
        roles = roles_of(schema.name, named)
        return {places.get(name, name): fill for name, fill in roles.items()}

    def number(self, of: TensorUse, fill: Fill | None) -> int:
        """The tensor that an op takes, such that it holds what the op needs."""
        number = self.tensors.take(of)
        whole = of.spec.dtype in WHOLE
        if fill is None or whole == (fill["kind"] == POSITIVE):
            return number
        root = self._root.get(number, number)
        if fill["kind"] == POSITIVE:
            if root in self.tensors.made:
                self._set_fill(root, fill)
            return number
        if root in self.tensors.made and root not in self._overwritten:
            self._set_fill(root, fill)
            return number
        if fill["kind"] == "offsets":
            self._add_up(root, fill["total"])
        consistent = self._consistent.get(root)
        known = consistent is not None and fill["kind"] != OF_TABLES
        if known and (consistent or fill["kind"] not in IDS):
            return number
        if root not in self._instead:
            self._instead[root] = self.tensors.fresh(of.spec)
            self._set_fill(self._instead[root], fill)
            self.pinned += 1
        made = self._instead[root]
        if self.tensors.specs[made].shape != of.spec.shape:
            made = self.tensors.fresh(of.spec)
            self._set_fill(made, fill)
        return made

    def note_outputs(self, call: Call, schema: Schema) -> None:
        """Remember whose values the outputs of an op have."""
        name = schema.name
        gives = call.gives()
        if not name.startswith(CHECKS) and not is_lookup(name):
            for parameter, term in zip(schema.parameters, call.arguments, strict=False):
                if parameter.written:
                    self._overwritten.update(slots(term))
        if name == SUMS and isinstance(call.arguments[0], Slot):
            source = call.arguments[0].number
            self._lengths |= dict.fromkeys(gives, self._root.get(source, source))
        if name in CONSISTENT:
            for number in gives:
                self._consistent[number] = name not in IDS_ANYWHERE
        elif name in PASSING and len(gives) == 1 and isinstance(call.arguments[0], Slot):
            source = call.arguments[0].number
            same = self.tensors.specs[source].shape
            if _count(same) == _count(self.tensors.specs[gives[0]].shape):
                self._root[gives[0]] = self._root.get(source, source)

    def note_received(self, call: Call) -> None:
        """What other ranks send is not known: whoever needs legal values gets its own."""
        for term in call.arguments[:1]:
            self._overwritten.update(slots(term))

    def _add_up(self, offsets: int, total: int) -> None:
        """Lengths made up front, of which an op makes offsets, are of as many ids as there are."""
        lengths = self._lengths.get(offsets)
        if lengths in self.tensors.made and lengths not in self._overwritten:
            self._set_fill(lengths, {"kind": "lengths", "total": total})

    def _set_fill(self, number: int, fill: Fill) -> None:
        if fill["kind"] == OF_TABLES:
            self.fills[number] = fill
        known = self.fills.setdefault(number, fill)
        if known["kind"] == fill["kind"] and "high" in fill and fill["high"] < known["high"]:
            self.fills[number] = fill


def _weights(schema: Schema, node: Node) -> tuple[int, int]:
    """The memory of a lookup's weights."""
    for parameter, argument in zip(schema.parameters, node.inputs, strict=False):
        if parameter.name in ("weights", *WEIGHTS):
            for of in tensors_of(argument):
                if of is not None and of.tensor.numel:
                    return of.tensor.storage, of.tensor.offset
    return 0, node.id


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
