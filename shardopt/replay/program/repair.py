"""Mends an execution trace before its ops are chosen: wrong callers, and ops inside wrappers.

Callers: with gloo an execution trace may have them wrong; the times of its Kineto trace correct
them.

Wrappers: compiled code (`_c10d_functional`) and DTensor pass results of collectives around in
tensors that wait when they are read. The trace shows a wrapper as another tensor. The collective
itself, and each op on the tensor inside, are recorded one level deeper: these are replayed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from predictor.trace.events import HostEvent, RankTrace
from predictor.trace.execution import Argument, ExecutionTrace, Node, Tensor, Value

GLOO = "gloo:"


def fix_callers(trace: ExecutionTrace, times: RankTrace | None) -> ExecutionTrace:
    """The trace with the callers that its Kineto trace shows, if gloo took part.

    gloo ends its records on its own threads, after which the observer takes later ops for
    children of whatever was open. Spans on a thread nest, whoever ends a record.
    """
    gloo = any(node.name.startswith(GLOO) for node in trace.nodes)
    if times is None or not gloo:
        return trace
    threads: dict[int, list[HostEvent]] = defaultdict(list)
    for event in times.host:
        if event.node is not None and not event.name.startswith(GLOO):
            threads[event.thread].append(event)
    parents: dict[int, int] = {}
    for events in threads.values():
        events.sort(key=lambda event: (event.start_us, -event.end_us, event.node or 0))
        callers: list[HostEvent] = []
        for event in events:
            while callers and callers[-1].end_us < event.end_us:
                callers.pop()
            parents[event.node or 0] = (callers[-1].node or 0) if callers else 0
            callers.append(event)
    nodes = (
        replace(node, parent=parents[node.id]) if node.id in parents else node
        for node in trace.nodes
    )
    return replace(trace, nodes=tuple(nodes))


FUNCTIONAL = ("_c10d_functional::", "_c10d_functional_autograd::")
WRAPPED = "_c10d_functional::_wrap_tensor_autograd"
SUBCLASS = "PythonSubclass"
"""PyTorch's record of a tensor subclass that handles an op itself."""


def open_wrappers(trace: ExecutionTrace) -> ExecutionTrace:
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
    return tuple(replace(a, value=_unwrap(a.value, inside)) for a in arguments)


def _unwrap(value: Value, inside: dict[int, Tensor]) -> Value:
    if isinstance(value, Tensor):
        return inside.get(value.id, value)
    if isinstance(value, tuple):
        return tuple(_unwrap(item, inside) for item in value)
    return value
