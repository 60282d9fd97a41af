"""Collectives of a trace as calls of `torch.distributed`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from predictor.trace.execution import Node
from shardopt.replay.program.literals import UnwritableError
from shardopt.replay.program.program import Number, Term
from shardopt.replay.program.schema import Schema
from shardopt.replay.program.tensors import TensorUse, tensors_of

KNOWN: dict[str, tuple[str, ...]] = {
    "alltoall_base_": ("output", "input", "output_split_sizes", "input_split_sizes"),
    "alltoall_": ("output_tensors", "input_tensors"),
    "allreduce_": ("tensors",),
    "allreduce_coalesced_": ("tensors",),
    "broadcast_": ("tensors", "root_rank"),
    "reduce_": ("tensors", "root_rank"),
    "allgather_": ("output_tensors", "input_tensors"),
    "_allgather_base_": ("output_tensor", "input_tensor"),
    "allgather_into_tensor_coalesced_": ("outputs", "inputs"),
    "reduce_scatter_": ("output_tensors", "input_tensors"),
    "_reduce_scatter_base_": ("output_tensor", "input_tensor"),
    "reduce_scatter_tensor_coalesced_": ("outputs", "inputs"),
    "allgather_coalesced_": ("output_lists", "input_list"),
    "gather_": ("output_tensors", "input_tensors", "root_rank"),
    "scatter_": ("output_tensors", "input_tensors", "root_rank"),
    "send": ("tensors", "dst", "tag"),
    "recv_": ("tensors", "src", "tag"),
    "recv_any_source_": ("tensors", "tag"),
    "barrier": (),
    "monitored_barrier_": (),
}
"""Collective -> the arguments that `torch.distributed` takes, by c10d's names (`Ops.cpp`)."""
SENT = ("input", "input_tensor", "input_tensors", "inputs", "input_list", "tensors")
RECEIVED = frozenset({"recv_", "recv_any_source_"})
"""Those whose ``tensors`` other ranks send."""


def collective_call(
    node: Node, schema: Schema, tensor: Callable[[TensorUse | None, Any], Term]
) -> tuple[tuple[Term, ...], int]:
    """Arguments of a collective, and the bytes that this rank gives it.

    Raises:
        UnwritableError: `torch.distributed` has no call for it.
    """
    kind = schema.name.partition("::")[2]
    if kind not in KNOWN:
        raise UnwritableError("no call of torch.distributed is known for this collective")
    named = dict(zip((p.name for p in schema.parameters), node.inputs, strict=False))
    terms: list[Term] = []
    for name in KNOWN[kind]:
        argument = named.get(name)
        if argument is None:
            raise UnwritableError(f"the trace does not hold its `{name}`")
        value = argument.value
        if any(True for _ in argument.tensors()):
            found = tuple(tensor(of, None) for of in tensors_of(argument))
            terms.append(found if isinstance(value, tuple) else found[0])
        elif isinstance(value, tuple):
            terms.append(tuple(Number(size) for size in value if isinstance(size, int)))
        elif isinstance(value, int):
            terms.append(Number(value))
        else:
            raise UnwritableError(f"the trace does not hold its `{name}`")
    sent = (named[name] for name in SENT if name in named and kind not in RECEIVED)
    size = sum(t.size_bytes for argument in sent for t in argument.tensors())
    return tuple(terms), size
