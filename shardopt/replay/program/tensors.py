"""Which tensor of a trace is which: numbers for tensors, by how they see their storage.

Ids of an execution trace name tensor objects. Autograd hands a saved tensor back as another object,
and ids and storages are used again after their tensors died. So a tensor is known by its view of a
storage, and an op that gives a tensor in a storage it did not take begins a new life of it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from predictor.trace.execution import Argument, Shape, Tensor, Value
from shardopt.replay.program.program import ITEMS, TensorSpec

KIND = re.compile(r"Tensor\(((?:[^()]|\([^()]*\))*)\)|None")


class TensorUse(NamedTuple):
    """A tensor as an argument has it, and how it sees its storage, by which it is known: saved by
    autograd, it comes back with another id."""

    tensor: Tensor
    spec: TensorSpec


def contiguous(shape: Iterable[int]) -> tuple[int, ...]:
    """Strides of a tensor whose elements lie one after the other."""
    steps: list[int] = []
    step = 1
    for size in reversed(tuple(shape)):
        steps.append(step)
        step *= max(size, 1)
    return tuple(reversed(steps))


def tensors_of(argument: Argument) -> list[TensorUse | None]:
    """The tensors of an argument in order; None for what is no defined tensor in a list."""
    kinds = iter([match[1] or "" for match in KIND.finditer(argument.type)])
    return list(_tensors_of(argument.value, argument.shape, argument.strides, kinds))


def _tensors_of(
    value: Value, shape: Shape, strides: Shape, kinds: Iterator[str]
) -> Iterator[TensorUse | None]:
    if isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from _tensors_of(item, _inner(shape, i), _inner(strides, i), kinds)
        return
    dtype = ITEMS.get(next(kinds, ""))
    if not isinstance(value, Tensor) or dtype is None:
        yield None
        return
    sizes, steps = (tuple(n for n in of if isinstance(n, int)) for of in (shape, strides))
    if len(steps) != len(sizes):
        steps = contiguous(sizes)
    host = not value.device.startswith(("cuda", "hpu", "xpu", "mps"))
    spec = TensorSpec(sizes, steps, dtype, value.storage, value.offset, host)
    yield TensorUse(value, spec)


def _inner(nested: Shape, i: int) -> Shape:
    """Of an item of a list of tensors."""
    inner = nested[i] if i < len(nested) else ()
    return inner if isinstance(inner, tuple) else ()


class Tensors:
    """Numbers tensors while a program is read from start to end.

    `made` and `specs` map numbers to what the tensors are like; `made` has those that no op gave.
    """

    def __init__(self) -> None:
        self.specs: dict[int, TensorSpec] = {}
        self.made: dict[int, TensorSpec] = {}
        self.storage_of: dict[int, int] = {}
        self.hidden_views = 0
        self._live: dict[int, dict[TensorSpec, int]] = defaultdict(dict)
        self._stores: dict[tuple[int, str], int] = {}
        self._count = 0
        self._stored = 0

    def find(self, of: TensorUse) -> int | None:
        """The number of a tensor that is known."""
        return self._live[of.tensor.storage].get(of.spec)

    def take(self, of: TensorUse) -> int:
        """The number of a tensor that an op takes; it is made up front if none gave it."""
        known = self.find(of)
        if known is not None:
            return known
        number = self._new(of)
        store = (of.tensor.storage, of.spec.dtype)
        given = any(n not in self.made for n in self._live[of.tensor.storage].values())
        self.hidden_views += given and of.tensor.storage != 0
        if given or store not in self._stores or of.tensor.numel == 0:
            self._stores[store] = self._stored
            self._stored += 1
        self.made[number] = replace(of.spec, storage=self._stores[store])
        self._live[of.tensor.storage][of.spec] = number
        return number

    def fresh(self, spec: TensorSpec) -> int:
        """A tensor of its own that is made up front."""
        number = self._count
        self._count += 1
        self.made[number] = self.specs[number] = replace(spec, storage=self._stored, offset=0)
        self._stored += 1
        return number

    def handle(self) -> int:
        """A number for what is no tensor."""
        self._count += 1
        return self._count - 1

    def give(self, of: TensorUse, taken: Mapping[int, Mapping[int, TensorSpec]]) -> int | None:
        """The number of a tensor that an op gives; None if it is one that it took.

        Args:
            taken: storages of what the op took -> ids of its tensors there -> how they were known.
        """
        storage = of.tensor.storage
        if storage in taken:
            if self.find(of) is not None:
                return None
            before = taken[storage].get(of.tensor.id)
            if before is not None:
                # the op changed its shape in place: what it was is no more
                self._live[storage].pop(before, None)
        else:
            self._live.pop(storage, None)
            for store in [store for store in self._stores if store[0] == storage]:
                del self._stores[store]
        number = self._new(of)
        self._live[storage][of.spec] = number
        return number

    def _new(self, of: TensorUse) -> int:
        number = self._count
        self._count += 1
        self.specs[number] = of.spec
        self.storage_of[number] = of.tensor.storage
        return number
