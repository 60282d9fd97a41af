"""Chains of memory-bound ops as one pass over memory.

A compiler writes pointwise ops and reductions that share data as one kernel, which reads what the
chain is given and writes what is used after it (PyTorch's Inductor: Ansel et al. 2024, 4.3).
A CPU that steps one parameter after the other does the same with its caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from predictor.cost.ops.op_names import FUSED_BY_COMPILERS, GATHERS
from predictor.cost.ops.op_time import is_foreach, plain_name, read_and_written
from predictor.model.op_calls import OpCall


def outer_bytes(calls: Sequence[OpCall]) -> int:
    """Bytes that ops read of what was there before them, and write of what stays after them."""
    made: set[int] = set()
    freed = {storage for call in calls for storage in call.freed}
    sizes: dict[tuple[str, int, tuple[int, int]], int] = {}
    for call in calls:
        read, written = read_and_written(call)
        for operand in read:
            if operand.storage not in made:
                sizes["read", operand.storage, operand.span] = operand.bytes
        given = {operand.storage for operand in call.inputs}
        made |= {operand.storage for operand in written if operand.storage not in given}
        for operand in written:
            if operand.storage not in freed or operand.storage not in made:
                sizes["written", operand.storage, operand.span] = operand.bytes
    return sum(sizes.values())


def fusible(call: OpCall) -> bool:
    """Whether a compiler can make it a part of a kernel."""
    name = plain_name(call)
    return not is_foreach(call) and name in FUSED_BY_COMPILERS and name not in GATHERS


def fused_chains(calls: Sequence[OpCall]) -> Iterator[list[OpCall]]:
    """The ops as a compiler runs them: chains of those that share data, all others alone; views,
    which compiled code does not run, are left out."""
    run: list[OpCall] = []
    for call in calls:
        if not call.moves:
            continue
        if fusible(call):
            run.append(call)
            continue
        yield from _connected(run)
        run = []
        yield [call]
    yield from _connected(run)


def _connected(run: Sequence[OpCall]) -> Iterator[list[OpCall]]:
    """The parts of a run that share no memory with each other."""
    parts: list[tuple[set[int], list[OpCall]]] = []
    for call in run:
        used = {operand.storage for operand in (*call.inputs, *call.outputs)}
        chain: list[OpCall] = []
        apart = []
        for storages, calls in parts:
            if storages & used:
                used |= storages
                chain += calls
            else:
                apart.append((storages, calls))
        parts = [*apart, (used, [*chain, call])]
    yield from (calls for _, calls in parts)
