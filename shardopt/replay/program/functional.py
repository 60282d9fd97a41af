"""Functional collectives (`_c10d_functional`) and tensor subclasses, as the ops they are made of.

Compiled code and DTensor hand collectives' results around in wrappers: tensors that wait when they
are read. The trace shows them as tensors of their own. The collective itself, and each op on what
is inside a wrapper, are recorded below: these are replayed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from predictor.trace.execution import Argument, ExecutionTrace, Node, Tensor, Value

FUNCTIONAL = ("_c10d_functional::", "_c10d_functional_autograd::")
WRAPPED = "_c10d_functional::_wrap_tensor_autograd"
SUBCLASS = "PythonSubclass"
"""PyTorch's record of a tensor subclass that handles an op itself."""


def unwrapped(trace: ExecutionTrace) -> ExecutionTrace:
    """The trace with such ops open, and with the tensors in wrappers in their place."""
    open_ids = {node.parent for node in trace.nodes if node.name == SUBCLASS}
    open_ids |= {node.id for node in trace.nodes if node.name.startswith(FUNCTIONAL)}
    if not open_ids:
        return trace
    return replace(trace, nodes=tuple(_nodes(trace, open_ids)))


def _nodes(trace: ExecutionTrace, open_ids: set[int]) -> Iterator[Node]:
    inside: dict[int, Tensor] = {}
    for node in trace.nodes:
        if node.name == WRAPPED:
            pairs = zip(_tensors(node.inputs), _tensors(node.outputs), strict=False)
            inside |= {outer.id: inner for inner, outer in pairs}
        if node.id in open_ids:
            yield replace(node, schema="")
            continue
        for tensor in _tensors(node.outputs):
            inside.pop(tensor.id, None)
        yield replace(node, inputs=_inner(node.inputs, inside)) if inside else node


def _tensors(arguments: tuple[Argument, ...]) -> list[Tensor]:
    return [tensor for argument in arguments for tensor in argument.tensors()]


def _inner(arguments: tuple[Argument, ...], inside: dict[int, Tensor]) -> tuple[Argument, ...]:
    return tuple(replace(a, value=_unwrapped(a.value, inside)) for a in arguments)


def _unwrapped(value: Value, inside: dict[int, Tensor]) -> Value:
    if isinstance(value, Tensor):
        return inside.get(value.id, value)
    if isinstance(value, tuple):
        return tuple(_unwrapped(item, inside) for item in value)
    return value
