"""The ops of one training step as a framework issues them: what each reads, writes and frees.

A `DenseProgram` is the dense part of an iteration, with the lookups among its ops. It is made at
one batch size from a captured module or from the layers of a model file. `predictor.cost.dense`
gives its cost, `predictor.model.memory` its memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

CAUSAL = "_causal"
"""Suffix of the name of causal attention, in which no query sees the keys after it."""


@dataclass(frozen=True)
class Operand:
    """A tensor that an op reads or returns.

    Args:
        storage: number of its memory; views share it.
        storage_bytes: size of that memory.
        offset, strides: in elements.
        item_bytes: of one element.
        data_type: such as ``fp32``, ``bf16`` or ``int64``; empty where it was not noted.
    """

    storage: int
    storage_bytes: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    data_type: str = ""

    @property
    def elements(self) -> int:
        """Elements, each counted as often as it is seen."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes that a pass over it touches; what broadcasting repeats counts once."""
        sizes = [n for n, stride in zip(self.shape, self.strides, strict=True) if stride]
        return math.prod(sizes) * self.item_bytes

    @property
    def side(self) -> str:
        """``n`` for rows that lie together, ``t`` for others."""
        return "n" if self.shape[-1] == 1 or self.strides[-1] == 1 else "t"

    @property
    def span(self) -> tuple[int, int]:
        """First and last byte within its memory, the last exclusive."""
        steps = zip(self.shape, self.strides, strict=True)
        last = sum((n - 1) * stride for n, stride in steps) if self.elements else -1
        return self.offset * self.item_bytes, (self.offset + last + 1) * self.item_bytes


@dataclass(frozen=True)
class OpCall:
    """One call of an op.

    Args:
        name: such as ``mm``, without namespace and overload; what decides the cost besides the
            tensors is in it, as in ``pow_2`` and with `CAUSAL`.
        inputs, outputs: tensors in the order of the arguments and results.
        freed: numbers of the memory that is given back before the next call.
        mutates: it writes into an input.
        path: of the module that calls it, or in the backward whose call it undoes.
    """

    name: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    freed: tuple[int, ...] = field(default=())
    mutates: bool = False
    path: str = field(default="", compare=False)

    @property
    def moves(self) -> bool:
        """True if the call touches data; views and empty tensors do not."""
        input_storages = {operand.storage for operand in self.inputs}
        if self.name.startswith("empty") or self.name in ("_local_scalar_dense", "new_empty"):
            return False
        return self.mutates or any(out.storage not in input_storages for out in self.outputs)

    @property
    def layout(self) -> str:
        """Access pattern of a kernel: a letter for each tensor."""
        widest = max((o.elements for o in self.inputs + self.outputs), default=0)
        letters = "".join(letter(operand, widest) for operand in self.inputs)
        return letters if self.mutates else f"{letters}>{len(self.outputs)}"

    @property
    def kind(self) -> str:
        """Calls of one kind share a kernel model; only their sizes differ."""
        return f"{self.name} {self.layout}"


def letter(operand: Operand, widest: int) -> str:
    """``s`` a single element, ``b`` fewer than the widest tensor has, ``c`` contiguous; else the
    order of its axes in memory, such as ``0213``."""
    if operand.elements <= 1:
        return "s"
    axes = [(n, stride) for n, stride in zip(operand.shape, operand.strides, strict=True) if n > 1]
    if operand.elements < widest or not all(stride for _, stride in axes):
        return "b"
    expected, dense = 1, True
    for n, stride in reversed(axes):
        dense &= stride == expected
        expected *= n
    if dense:
        return "c"
    order = sorted(range(len(axes)), key=lambda axis: -axes[axis][1])
    return "".join(map(str, order))


@dataclass(frozen=True)
class Lookup:
    """Call of an embedding module.

    Args:
        module: its name in the workload's tables.
        outputs: tensors that it returns; the first op that reads one of them waits for the module.
    """

    module: str
    outputs: tuple[Operand, ...]


@dataclass(frozen=True)
class LookupBackward:
    """The gradients of an embedding module's outputs are complete."""

    module: str
    gradients: tuple[Operand, ...]


@dataclass(frozen=True)
class Gradient:
    """The gradient of a dense parameter is complete, of so many elements and bytes each."""

    elements: int
    item_bytes: int = 4


Event = OpCall | Lookup | LookupBackward | Gradient


@dataclass(frozen=True)
class DenseProgram:
    """Ops of one rank in an iteration, without embedding modules and collectives.

    All three parts share the numbers of storages. Memory that an op frees is gone before the next
    event.

    Args:
        batch_size: samples of the rank.
        forward, backward, optimizer: events in issue order; the backward is that of autograd, with
            recomputation.
        resident: storages that exist before the forward and stay: parameters and buffers.
        state_bytes: bytes of the dense optimizer's states.
    """

    batch_size: int
    forward: tuple[Event, ...]
    backward: tuple[Event, ...]
    optimizer: tuple[Event, ...]
    resident: tuple[Operand, ...] = ()
    state_bytes: int = 0

    def with_parameters(self, lengths: Sequence[int], states: int) -> DenseProgram:
        """Add parameters of embedding modules that the dense optimizer steps.

        Args:
            lengths: elements of each, of 4 bytes; their gradients come last.
            states: of the optimizer, as large as the parameters.
        """
        if not lengths:
            return self
        parts = (self.forward, self.backward, self.optimizer)
        events = [event for part in parts for event in part]
        used = [o.storage for e in events for o in operands_of(e)]
        first = 1 + max([*used, *(o.storage for o in self.resident)], default=0)
        operands = tuple(
            Operand(first + at, 4 * n, 0, (n,), (1,), 4, "fp32")
            for at, n in enumerate((*lengths, *lengths))
        )
        parameters = operands[: len(lengths)]
        return replace(
            self,
            backward=(*self.backward, *map(Gradient, lengths)),
            optimizer=(
                *self.optimizer,
                OpCall("_foreach_add_", operands, parameters, mutates=True),
            ),
            resident=(*self.resident, *parameters),
            state_bytes=self.state_bytes + states * 4 * sum(lengths),
        )

    @property
    def gradient_bytes(self) -> int:
        return sum(e.elements * e.item_bytes for e in self.backward if isinstance(e, Gradient))


def operands_of(event: Event) -> tuple[Operand, ...]:
    if isinstance(event, OpCall):
        return (*event.inputs, *event.outputs)
    if isinstance(event, Lookup):
        return event.outputs
    return event.gradients if isinstance(event, LookupBackward) else ()


def free_after_last_use(
    parts: Sequence[Sequence[Event]], resident: Sequence[Operand]
) -> tuple[tuple[Event, ...], ...]:
    """Return the parts, in which each op also frees what nothing after it uses.

    Args:
        resident: memory that stays, or that the ops free already.
    """
    stays = {operand.storage for operand in resident}
    events = [event for part in parts for event in part]
    last = {o.storage: at for at, event in enumerate(events) for o in operands_of(event)}
    ends: dict[int, list[int]] = {}
    for storage, at in last.items():
        if storage not in stays:
            ends.setdefault(at, []).append(storage)
    unused: list[int] = []
    for at, event in enumerate(events):
        unused += ends.get(at, [])
        # a gradient that a lookup takes goes with the next op
        if isinstance(event, OpCall) and unused:
            events[at] = replace(event, freed=(*event.freed, *unused))
            unused = []
    rest = iter(events)
    return tuple(tuple(islice(rest, len(part))) for part in parts)
