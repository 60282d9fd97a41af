"""Gives arguments that need legal whole numbers tensors that hold them."""

from __future__ import annotations

from typing import Any

from predictor.trace.execution import Node
from shardopt.replay.program import WHOLE, Call, Slot, slots
from shardopt.replay.schema import Schema
from shardopt.replay.tensors import Seen, Tensors, seen
from shardopt.replay.values import (
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
IDS = frozenset({"ids", "table_ids", "rows"})


class Legal:
    """Decides what tensors made up front hold.

    `fills` maps their numbers to it; what has none holds plain numbers or zeros. `pinned` counts
    those that stand in for a tensor that an op gives.
    """

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self.fills: dict[int, Fill] = {}
        self.pinned = 0
        self._instead: dict[int, int] = {}
        self._root: dict[int, int] = {}
        self._consistent: dict[int, bool] = {}
        self._overwritten: set[int] = set()

    def for_op(self, schema: Schema, node: Node) -> dict[str, Fill]:
        """Name of an argument (of items of lists ``name.i``) -> what it must hold."""
        named: dict[str, Any] = {}
        places: dict[str, str] = {}
        for parameter, argument in zip(schema.parameters, node.inputs, strict=False):
            found = seen(argument) if "Tensor" in parameter.base else []
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
        roles = roles_of(schema.name, named)
        return {places.get(name, name): fill for name, fill in roles.items()}

    def number(self, of: Seen, fill: Fill | None) -> int:
        """The tensor that an op takes, such that it holds what the op needs."""
        number = self.tensors.take(of)
        whole = of.spec.dtype in WHOLE
        if fill is None or whole == (fill["kind"] == POSITIVE):
            return number
        root = self._root.get(number, number)
        if fill["kind"] == POSITIVE:
            if root in self.tensors.made:
                self._hold(root, fill)
            return number
        if root in self.tensors.made and root not in self._overwritten:
            self._hold(root, fill)
            return number
        consistent = self._consistent.get(root)
        if consistent is not None and (consistent or fill["kind"] not in IDS):
            return number
        if root not in self._instead:
            self._instead[root] = self.tensors.fresh(of.spec)
            self._hold(self._instead[root], fill)
            self.pinned += 1
        made = self._instead[root]
        if self.tensors.specs[made].shape != of.spec.shape:
            made = self.tensors.fresh(of.spec)
            self._hold(made, fill)
        return made

    def passed_on(self, call: Call, schema: Schema) -> None:
        """Remember whose values the outputs of an op have."""
        name = schema.name
        gives = call.gives()
        if not name.startswith(CHECKS) and not is_lookup(name):
            for parameter, term in zip(schema.parameters, call.arguments, strict=False):
                if parameter.written:
                    self._overwritten.update(slots(term))
        if name in CONSISTENT:
            for number in gives:
                self._consistent[number] = name not in IDS_ANYWHERE
        elif name in PASSING and len(gives) == 1 and isinstance(call.arguments[0], Slot):
            source = call.arguments[0].number
            same = self.tensors.specs[source].shape
            if _count(same) == _count(self.tensors.specs[gives[0]].shape):
                self._root[gives[0]] = self._root.get(source, source)

    def received(self, call: Call) -> None:
        """What other ranks send is not known: whoever needs legal values gets its own."""
        for term in call.arguments[:1]:
            self._overwritten.update(slots(term))

    def _hold(self, number: int, fill: Fill) -> None:
        known = self.fills.setdefault(number, fill)
        if known["kind"] == fill["kind"] and "high" in fill and fill["high"] < known["high"]:
            self.fills[number] = fill


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
