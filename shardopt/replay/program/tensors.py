"""Identifies the tensors of a trace by their views of storages, and numbers them.

Ids of an execution trace name tensor objects. Autograd hands a saved tensor back as another object,
and ids and storages are reused after their tensors died. So a tensor is identified by its view of a
storage, and an op that gives a tensor in a storage it did not take begins a new life of the
storage.
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
    """A tensor of an argument, and the view of its storage that identifies it.

    The id does not: a tensor that autograd saved comes back with another one.
    """

    tensor: Tensor
    spec: TensorSpec


def contiguous(shape: Iterable[int]) -> tuple[int, ...]:
    """Return the strides of a tensor whose elements lie one after the other."""
    steps: list[int] = []
    step = 1
    for size in reversed(tuple(shape)):
        steps.append(step)
        step *= max(size, 1)
    return tuple(reversed(steps))


def tensors_of(argument: Argument) -> list[TensorUse | None]:
    """Return the tensors of an argument in order; None for an undefined item of a list."""
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
    sizes, steps = (tuple(n for n in extents if isinstance(n, int)) for extents in (shape, strides))
    if len(steps) != len(sizes):
        steps = contiguous(sizes)
    host = not value.device.startswith(("cuda", "hpu", "xpu", "mps"))
    spec = TensorSpec(sizes, steps, dtype, value.storage, value.offset, host)
    yield TensorUse(value, spec)


def _inner(nested: Shape, i: int) -> Shape:
    """Return the shape or strides of an item of a list of tensors."""
    inner = nested[i] if i < len(nested) else ()
    return inner if isinstance(inner, tuple) else ()


class Tensors:
    """Numbers of tensors, assigned while a program is read from start to end.

    `specs` has all tensors by number, `made` the tensors that no op gave.
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

    def find(self, use: TensorUse) -> int | None:
        """Return the number of a tensor; None for a new one."""
        return self._live[use.tensor.storage].get(use.spec)

    def take(self, use: TensorUse) -> int:
        """Return the number of a tensor that an op takes; made up front if no op gave it."""
        existing = self.find(use)
        if existing is not None:
            return existing
        number = self._new(use)
        store = (use.tensor.storage, use.spec.dtype)
        from_op = any(n not in self.made for n in self._live[use.tensor.storage].values())
        self.hidden_views += from_op and use.tensor.storage != 0
        if from_op or store not in self._stores or use.tensor.numel == 0:
            self._stores[store] = self._stored
            self._stored += 1
        self.made[number] = replace(use.spec, storage=self._stores[store])
        self._live[use.tensor.storage][use.spec] = number
        return number

    def fresh(self, spec: TensorSpec) -> int:
        """Number a new tensor that is made up front in its own storage."""
        number = self._count
        self._count += 1
        self.made[number] = self.specs[number] = replace(spec, storage=self._stored, offset=0)
        self._stored += 1
        return number

    def handle(self) -> int:
        """Return a number for an object that is no tensor."""
        self._count += 1
        return self._count - 1

    def give(self, use: TensorUse, inputs: Mapping[int, Mapping[int, TensorSpec]]) -> int | None:
        """Return the number of a tensor that an op gives; None if the op took it too.

        Args:
            inputs: storage -> id of an input tensor in it -> its spec.
        """
        storage = use.tensor.storage
        if storage in inputs:
            if self.find(use) is not None:
                return None
            before = inputs[storage].get(use.tensor.id)
            if before is not None:
                # the op changed its shape in place, so the old view is gone
                self._live[storage].pop(before, None)
        else:
            self._live.pop(storage, None)
            for store in [store for store in self._stores if store[0] == storage]:
                del self._stores[store]
        number = self._new(use)
        self._live[storage][use.spec] = number
        return number

    def _new(self, use: TensorUse) -> int:
        number = self._count
        self._count += 1
        self.specs[number] = use.spec
        self.storage_of[number] = use.tensor.storage
        return number
