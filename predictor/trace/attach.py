"""Ties an execution trace to the Kineto trace of the same program."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from predictor.trace.align import align
from predictor.trace.comms import CommInfo, HostComms, info_of_call, size_notes, with_order
from predictor.trace.events import DeviceEvent, HostEvent, RankTrace
from predictor.trace.execution import ExecutionTrace, Node

ENOUGH = 0.8
"""Share of the nodes that must find their op for two traces to count as one program's."""
TENSOR_TYPE = re.compile(r"Tensor\((.*)\)$")


def attach(trace: RankTrace, execution: ExecutionTrace) -> RankTrace:
    """Give ops their nodes, and what the nodes know: shapes, types, sizes of collectives.

    Which op is which node: since PyTorch 2.4 (pytorch/pytorch pull 122948) Kineto writes "Record
    function id", which is the node's ``rf_id`` where both recorded the same iteration. Before that
    it wrote only "External id", which counts up along a thread as ``rf_id`` does, but by blocks
    and from another start. There, and where the iterations differ, the ops of a thread are matched
    with the nodes of a thread by the order of their names. An execution trace of one iteration
    then serves every iteration that runs the same ops.

    Returns:
        The trace, with ``HostEvent.node`` set and missing facts filled in; if too few of the nodes
        are found among its ops, only a note is added.
    """
    matched = _by_record(trace.host, execution.nodes)
    if _share(matched, execution) < ENOUGH:
        matched = _by_order(trace.host, execution.nodes)
    share = _share(matched, execution)
    if share < ENOUGH:
        note = (
            f"the execution trace {execution.source} is of another program: only {share:.0%} of "
            "its ops are in this trace; it is left out"
        )
        return replace(trace, notes=(*trace.notes, note))
    host = tuple(
        event if (node := matched.get(i)) is None else _with_node(event, node)
        for i, event in enumerate(trace.host)
    )
    comms = [(host[i], node.comm) for i, node in matched.items() if node.comm is not None]
    tied = replace(trace, host=host, device=_add_sizes(trace, host, comms))
    before, after = size_notes(trace.device), size_notes(tied.device)
    return replace(tied, notes=(*(n for n in trace.notes if n not in before), *after))


def _share(matched: Mapping[int, Node], execution: ExecutionTrace) -> float:
    return len({node.id for node in matched.values()}) / len(execution.nodes)


def _by_record(host: Sequence[HostEvent], nodes: Iterable[Node]) -> dict[int, Node]:
    """Position of an op -> node, by PyTorch's own number of the call."""
    numbered = {node.record: node for node in nodes if node.record is not None}
    found = {}
    for i, event in enumerate(host):
        node = numbered.get(event.record) if event.record is not None else None
        if node is not None and node.name == event.name:
            found[i] = node
    return found


def _by_order(host: Sequence[HostEvent], nodes: Sequence[Node]) -> dict[int, Node]:
    """Position of an op -> node, by the order of names on a thread."""
    ops: dict[int, list[int]] = defaultdict(list)
    for i, event in enumerate(host):
        if event.kind != "runtime":
            ops[event.thread].append(i)
    ran: dict[int, list[Node]] = defaultdict(list)
    for node in nodes:
        ran[node.thread].append(node)
    found: dict[int, Node] = {}
    # a thread with few ops could be found in many places: the long ones choose first
    for thread in sorted(ran.values(), key=len, reverse=True):
        best: dict[int, Node] = {}
        for positions in ops.values():
            best = max(best, _on_thread(host, positions, thread, found), key=len)
        found |= best
    return found


def _on_thread(
    host: Sequence[HostEvent],
    positions: Sequence[int],
    nodes: Sequence[Node],
    taken: Mapping[int, Node],
) -> dict[int, Node]:
    free = [i for i in positions if i not in taken]
    # clocks of whole microseconds give many ops one start; the profiler's own number does not
    free.sort(key=lambda i: (host[i].external or 0, i))
    pairs = align([node.name for node in nodes], [host[i].name for i in free])
    return {free[j]: nodes[i] for i, j in pairs}


def _with_node(event: HostEvent, node: Node) -> HostEvent:
    shapes, dtypes = event.shapes, event.dtypes
    if shapes is None and node.inputs:
        shapes = tuple(_shape(a.shape) for a in node.inputs)
        dtypes = tuple(_dtype(a.type) for a in node.inputs)
    return replace(event, node=node.id, shapes=shapes, dtypes=dtypes)


def _shape(shape: tuple[object, ...]) -> tuple[int, ...]:
    """Shape of a tensor, or of the only tensor of a list, as in `HostEvent.shapes`."""
    if len(shape) == 1 and isinstance(shape[0], tuple):
        shape = shape[0]
    sizes = tuple(size for size in shape if isinstance(size, int))
    return sizes if len(sizes) == len(shape) else ()


def _dtype(kind: str) -> str:
    """Kineto's name of a type of an execution trace."""
    if match := TENSOR_TYPE.match(kind):
        return match[1]
    return "TensorList" if "Tensor(" in kind else "Scalar"


def _add_sizes(
    trace: RankTrace, host: Sequence[HostEvent], found: Iterable[tuple[HostEvent, CommInfo]]
) -> tuple[DeviceEvent, ...]:
    """Device events whose collectives know what the nodes around their launches say."""
    launched = {e.correlation: e for e in host if e.correlation is not None}
    around = HostComms(found)
    comms = []
    for event in trace.device:
        if event.collective is not None:
            launch = launched.get(event.correlation) if event.correlation is not None else None
            info = info_of_call(event.collective)
            comms.append((event, info if launch is None else info.or_else(around.around(launch))))
    rest = [event for event in trace.device if event.collective is None]
    return tuple(
        sorted([*rest, *with_order(comms, launched)], key=lambda e: (e.start_us, e.end_us))
    )
