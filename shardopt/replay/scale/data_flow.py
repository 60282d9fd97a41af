"""Which call of a program takes what which other call gave, through views and writes in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardopt.replay.program.collectives import KNOWN
from shardopt.replay.program.program import Call, RankProgram, TensorSpec, Term, slots


@dataclass(frozen=True)
class Flow:
    """What depends on what in a program, by the places of its calls.

    Args:
        needs: of each call, the calls whose results it takes.
        users: the reverse.
        specs: of all tensors that the program says, by number.
        memory: number -> a name of the memory that it lies in, the same for views of it.
        touched: name of a memory -> the calls that take or give it.
        writes: of each call, the memories that it writes in place.
    """

    needs: list[set[int]]
    users: list[set[int]]
    specs: dict[int, TensorSpec]
    memory: dict[int, Any]
    touched: dict[Any, set[int]]
    writes: list[set[Any]]


def flow_of(program: RankProgram) -> Flow:
    """Follow the tensors of a program from start to end."""
    specs = dict(program.made)
    memory: dict[int, Any] = {n: ("made", spec.storage) for n, spec in program.made.items()}
    flow = Flow([], [set() for _ in program.calls], specs, memory, defaultdict(set), [])
    last: dict[Any, int] = {}
    viewed: dict[int, int] = {}
    for at, call in enumerate(program.calls):
        specs.update(numbered(call.outputs, call.specs))
        written, whole = _aliases(call)
        reads = call.reads()
        needs = {last[memory[n]] for n in reads if memory.get(n) in last}
        needs |= {viewed[n] for n in reads if n in viewed}
        writes = {memory[n] for n in written if n in memory}
        for number in call.gives():
            if whole:
                memory[number] = memory.get(whole[0], ("given", whole[0]))
                viewed[number] = at
            else:
                memory[number] = ("given", number)
                last[memory[number]] = at
        for name in writes:
            last[name] = at
        for name in {memory[n] for n in (*reads, *call.gives()) if n in memory}:
            flow.touched[name].add(at)
        for need in needs:
            flow.users[need].add(at)
        flow.needs.append(needs)
        flow.writes.append(writes)
    return flow


def numbered(outputs: Any, specs: Any) -> Iterator[tuple[int, TensorSpec]]:
    """Numbers of outputs with what the tensors are like, where that is said."""
    for output, spec in zip(outputs, specs, strict=False):
        if isinstance(output, tuple):
            yield from numbered(output, spec if isinstance(spec, tuple) else ())
        elif output is not None and isinstance(spec, TensorSpec):
            yield output, spec


def _aliases(call: Call) -> tuple[list[int], list[int]]:
    """Tensors that a call writes in place, and those that its outputs may be views of."""
    if call.is_collective:
        names = KNOWN.get(call.collective, ())
        pairs = zip(names, call.arguments, strict=False)
        own = ("output", "tensors") if call.collective != "send" else ("output",)
        return [n for name, term in pairs if name.startswith(own) for n in slots(term)], []
    schema = _schema(call)
    if schema is None:
        first = call.arguments[:1] if call.op.endswith("_") else ()
        return [n for term in first for n in slots(term)], []
    named = dict(zip((of.name for of in schema.arguments), call.arguments, strict=False))
    named |= dict(call.keywords)
    written: list[int] = []
    viewed: list[int] = []
    for argument in schema.arguments:
        term: Term = named.get(argument.name)
        if argument.alias_info is not None and term is not None:
            (written if argument.alias_info.is_write else viewed).extend(slots(term))
    gives_views = any(of.alias_info is not None for of in schema.returns)
    return written, [*viewed, *written] if gives_views else []


def _schema(call: Call) -> Any:
    import torch

    try:
        overload = "" if call.overload == "default" else call.overload
        return torch._C._get_schema(call.op, overload)
    except RuntimeError:
        return None
