"""Memory of the dense part, event by event: the blocks that each op takes and gives back.

A plan changes what lookups take among these events, never the events themselves, so one list serves
every rank, plan and setting of a program.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain

from predictor.model.op_calls import (
    DenseProgram,
    Event,
    Gradient,
    Lookup,
    LookupBackward,
    OpCall,
    Operand,
    operands_of,
)


def block_key(storage: int) -> Hashable:
    """Return the name of a storage's block in the ledger."""
    return "dense", storage


@dataclass(frozen=True)
class Held:
    """Memory that an event takes, unless it is in use already.

    Args:
        key: name of its block.
        own_gradient: a gradient that the backward makes and the optimizer reads; DDP copies it into
            a bucket.
    """

    key: Hashable
    size: int
    own_gradient: bool


@dataclass(frozen=True)
class OpMemory:
    """Memory of one op.

    Args:
        reads: storages of its inputs.
        holds: blocks that it takes.
        frees: names of the blocks that it gives back.
        moves: it touches data.
    """

    reads: frozenset[int]
    holds: tuple[Held, ...]
    frees: tuple[Hashable, ...]
    moves: bool


@dataclass(frozen=True)
class ModuleLookup:
    """An embedding module's lookup among the ops.

    Args:
        storages: memory of its outputs.
        holds: blocks of its outputs.
    """

    name: str
    storages: frozenset[int]
    holds: tuple[Held, ...]


@dataclass(frozen=True)
class ModuleBackward:
    """An embedding module's backward among the ops.

    Args:
        whole: every gradient fills its memory.
        done: blocks that no later event uses.
    """

    name: str
    whole: bool
    done: tuple[Hashable, ...]


@dataclass(frozen=True)
class Bucketed:
    """A parameter's gradient is complete and goes into a bucket of DDP."""


MemoryEvent = OpMemory | ModuleLookup | ModuleBackward | Bucketed


@dataclass(frozen=True, eq=False)
class DenseMemory:
    """Dense part of an iteration as memory.

    Args:
        modules: lookups of the forward by module.
        ending: blocks that no iteration leaves to the next.
    """

    forward: tuple[MemoryEvent, ...]
    backward: tuple[MemoryEvent, ...]
    optimizer: tuple[MemoryEvent, ...]
    modules: Mapping[str, ModuleLookup]
    ending: tuple[Hashable, ...]


def dense_memory(program: DenseProgram, *, trains: bool) -> DenseMemory:
    """Return the memory of a program, computed once for it."""
    return _dense_memory(_Program(id(program), program), trains)


@dataclass(frozen=True)
class _Program:
    """Cache key of a program by identity: it has a thousand ops."""

    identity: int
    program: DenseProgram = field(compare=False)


@lru_cache(maxsize=64)
def _dense_memory(key: _Program, trains: bool) -> DenseMemory:
    program = key.program
    resident = {operand.storage for operand in program.resident}
    own_gradients = _own_gradients(program)
    last_uses = _last_uses(program, resident, trains=trains)

    def held(operands: Sequence[Operand], unless: frozenset[int] = frozenset()) -> tuple[Held, ...]:
        return tuple(
            Held(block_key(o.storage), o.storage_bytes, o.storage in own_gradients)
            for o in operands
            if o.storage not in resident and o.storage not in unless
        )

    def translate(event: Event) -> MemoryEvent:
        if isinstance(event, OpCall):
            reads = frozenset(operand.storage for operand in event.inputs)
            frees = tuple(map(block_key, event.freed))
            return OpMemory(reads, held(event.outputs, reads), frees, event.moves)
        if isinstance(event, Lookup):
            storages = frozenset(operand.storage for operand in event.outputs)
            return ModuleLookup(event.module, storages, held(event.outputs))
        if isinstance(event, LookupBackward):
            whole = all(o.bytes == o.storage_bytes for o in event.gradients)
            done = [o.storage for o in event.gradients if last_uses.get(o.storage) is event]
            return ModuleBackward(event.module, whole, tuple(map(block_key, done)))
        return Bucketed()

    parts = [
        [translate(event) for event in part]
        for part in (program.forward, program.backward, program.optimizer)
    ]
    lookups = [e.storages for e in parts[0] if isinstance(e, ModuleLookup)]
    outputs = frozenset[int]().union(*lookups)
    # views take nothing: with 2000 tables, 2041 of a backward's ops do
    forward, backward, optimizer = (
        tuple(e for e in part if not isinstance(e, OpMemory) or _has_effect(e, outputs))
        for part in parts
    )
    modules = {event.name: event for event in forward if isinstance(event, ModuleLookup)}
    return DenseMemory(forward, backward, optimizer, modules, tuple(map(block_key, last_uses)))


def _has_effect(op: OpMemory, outputs: frozenset[int]) -> bool:
    """Return True if an op changes memory under some plan.

    Args:
        outputs: storages of the lookups' outputs, which their first reader waits for.
    """
    return bool(op.holds or op.frees or op.moves or not outputs.isdisjoint(op.reads))


def _last_uses(program: DenseProgram, resident: set[int], *, trains: bool) -> dict[int, Event]:
    """Return storage number -> last event that uses it, for storages that the program makes."""
    parts = (program.forward, program.backward, program.optimizer)
    return {
        operand.storage: event
        for event in chain.from_iterable(parts if trains else parts[:1])
        for operand in operands_of(event)
        if operand.storage not in resident
    }


def _own_gradients(program: DenseProgram) -> frozenset[int]:
    """Return the storages that the backward makes and the optimizer reads."""
    if not any(isinstance(event, Gradient) for event in program.backward):
        return frozenset()
    written = {o.storage for e in program.backward if isinstance(e, OpCall) for o in e.outputs}
    read = {o.storage for e in program.optimizer for o in operands_of(e)}
    before_backward = {o.storage for o in program.resident}
    before_backward |= {o.storage for e in program.forward for o in operands_of(e)}
    return frozenset((written & read) - before_backward)
