"""Writes a program of ops by hand, with tensors that know their memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from predictor.model.dense_program import Event, Gradient, Lookup, LookupBackward
from predictor.model.op_calls import OpCall, Operand
from predictor.model.workload import DATA_TYPE_BYTES

ITEM_BYTES = DATA_TYPE_BYTES | {"int64": 8}

STATES = {"sgd": 0, "adagrad": 1, "adam": 2}
"""Dense optimizer -> states as large as the parameters."""


class OpWriter:
    """Appends ops to `events`; an op's method gives its output.

    Args:
        data_type: of products; parameters are fp32, and cast once where products are not.
    """

    def __init__(self, data_type: str) -> None:
        self.type = data_type
        self.storages = 0
        self.events: list[Event] = []
        self.parameters: list[Operand] = []
        self.gradients: list[Operand] = []

    def tensor(self, shape: Sequence[int], data_type: str = "fp32") -> Operand:
        """A new contiguous one."""
        item = ITEM_BYTES[data_type]
        self.storages += 1
        strides = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
        size = item * math.prod(shape)
        return Operand(self.storages, size, 0, tuple(shape), tuple(strides), item, data_type)

    def like(self, operand: Operand) -> Operand:
        return self.tensor(operand.shape, operand.data_type)

    def op(self, name: str, inputs: Sequence[Operand], output: Operand) -> Operand:
        self.events.append(OpCall(name, tuple(inputs), (output,)))
        return output

    def view(self, name: str, of: Operand, **changes: object) -> Operand:
        return self.op(name, [of], replace(of, **changes))  # type: ignore[arg-type]

    def t(self, of: Operand) -> Operand:
        """The last two axes exchanged."""
        shape = (*of.shape[:-2], of.shape[-1], of.shape[-2])
        strides = (*of.strides[:-2], of.strides[-1], of.strides[-2])
        return self.view("t" if len(shape) == 2 else "transpose", of, shape=shape, strides=strides)

    def columns(self, of: Operand, first: int, width: int) -> Operand:
        """A range of the columns of a matrix."""
        shape = (of.shape[0], width)
        return self.view("slice", of, shape=shape, strides=of.strides, offset=of.offset + first)

    def row(self, stacked: Operand, at: int) -> Operand:
        """A matrix of the middle axis of three."""
        batch, count, dim = stacked.shape
        offset, strides = at * dim, (count * dim, 1)
        return self.view("select", stacked, shape=(batch, dim), strides=strides, offset=offset)

    def copy(self, elements: float) -> list[Operand]:
        """So many elements read and written; gives what is read."""
        size = round(elements / 2)
        given = [self.tensor((size,))] if size else []
        for operand in given:
            self.op("clone", [operand], self.like(operand))
        return given

    def cast(self, of: Operand, data_type: str) -> Operand:
        if of.data_type == data_type:
            return of
        return self.op("_to_copy", [of], self.tensor(of.shape, data_type))

    def parameter(self, *shape: int) -> tuple[Operand, Callable[[Operand], None]]:
        """A parameter in the type of the products, and what takes its gradient."""
        parameter = self.tensor(shape)
        self.parameters.append(parameter)

        def take(gradient: Operand) -> None:
            self.gradients.append(self.cast(gradient, "fp32"))
            self.events.append(Gradient(parameter.elements))

        return self.cast(parameter, self.type), take

    def optimizer_step(self, kind: str) -> list[Operand]:
        """One step of torch.optim's foreach form; returns the states."""
        p, g = self.parameters, self.gradients
        states = [[self.like(of) for of in p] for _ in range(STATES[kind])]
        if kind == "sgd":
            self.each("_foreach_add_", p, g)
        elif kind == "adagrad":
            self.each("_foreach_addcmul_", states[0], g, g)
            root = self.made("_foreach_sqrt", states[0])
            self.each("_foreach_add_", root)
            self.each("_foreach_addcdiv_", p, self.made("_foreach_mul", g), root)
        else:
            first, second = states
            self.each("_foreach_lerp_", first, g)
            self.each("_foreach_mul_", second)
            self.each("_foreach_addcmul_", second, g, g)
            root = self.made("_foreach_sqrt", second)
            self.each("_foreach_div_", root)
            self.each("_foreach_add_", root)
            self.each("_foreach_addcdiv_", p, first, root)
        return [state for of in states for state in of]

    def each(self, name: str, *lists: Sequence[Operand]) -> None:
        """In place on the first list."""
        inputs = tuple(operand for of in lists for operand in of)
        if inputs:
            self.events.append(OpCall(name, inputs, tuple(lists[0]), mutates=True))

    def made(self, name: str, given: Sequence[Operand]) -> list[Operand]:
        made = [self.like(operand) for operand in given]
        if made:
            self.events.append(OpCall(name, tuple(given), tuple(made)))
        return made


def free_after_last_use(
    parts: Sequence[Sequence[Event]], kept: Sequence[Operand]
) -> tuple[tuple[Event, ...], ...]:
    """The parts, in which each op frees what nothing after it uses; what is kept stays."""
    seen = {operand.storage for operand in kept}
    found: list[list[Event]] = []
    for events in reversed(parts):
        part: list[Event] = []
        for event in reversed(events):
            used = _storages(event)
            last = tuple(dict.fromkeys(s for s in used if s not in seen))
            if isinstance(event, OpCall):
                event = replace(event, freed=last)
            elif part and isinstance(part[-1], OpCall):
                # a gradient that a lookup takes goes with the next op
                part[-1] = replace(part[-1], freed=(*part[-1].freed, *last))
            seen.update(used)
            part.append(event)
        found.append(part[::-1])
    return tuple(tuple(part) for part in reversed(found))


def _storages(event: Event) -> list[int]:
    if isinstance(event, OpCall):
        return [operand.storage for operand in (*event.inputs, *event.outputs)]
    if isinstance(event, Lookup):
        return [operand.storage for operand in event.outputs]
    return [g.storage for g in event.gradients] if isinstance(event, LookupBackward) else []
