"""Nodes of execution traces, made by hand."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from predictor.trace.comms import item_bytes
from predictor.trace.execution import Argument, ExecutionTrace, Node, Tensor, Value
from shardopt.replay.program.tensors import contiguous


def tensor(
    number: int,
    storage: int,
    shape: tuple[int, ...] = (2, 3),
    kind: str = "float",
    *,
    strides: tuple[int, ...] | None = None,
    offset: int = 0,
) -> Argument:
    """A tensor on the host.

    Args:
        number: id of the object.
        kind: C++ type of its items.
    """
    value = Tensor(number, storage, offset, prod(shape), item_bytes(kind) or 0, "cpu")
    steps = contiguous(shape) if strides is None else strides
    return Argument(value, shape, f"Tensor({kind})", steps)


def plain(value: Value, kind: str = "Int") -> Argument:
    """Return an argument that is no tensor."""
    return Argument(value, (), kind)


def op(
    number: int,
    name: str,
    inputs: Iterable[Argument] = (),
    outputs: Iterable[Argument] = (),
    parent: int = 0,
    schema: str = "",
    *,
    scope: int = 0,
    thread: int = 1,
) -> Node:
    """An op; without a schema, one that takes tensors and returns one."""
    inputs, outputs = tuple(inputs), tuple(outputs)
    parameters = ", ".join(f"Tensor x{i}" for i in range(len(inputs)))
    text = schema or f"{name}({parameters}) -> Tensor"
    return Node(number, parent, name, inputs, outputs, schema=text, scope=scope, thread=thread)


def note(
    number: int, name: str, parent: int = 0, *, scope: int = 7, inputs: Iterable[Argument] = ()
) -> Node:
    """An annotation, or another node without a schema.

    Args:
        scope: `at::RecordScope`; 7: of the user.
    """
    return Node(number, parent, name, tuple(inputs), (), scope=scope, thread=1)


def trace(*nodes: Node) -> ExecutionTrace:
    """A rank's trace."""
    return ExecutionTrace("rank0.json", "1.1.1", 0, 1, tuple(sorted(nodes, key=lambda n: n.id)))
