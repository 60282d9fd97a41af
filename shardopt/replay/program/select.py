"""Selects the ops of an execution trace to replay: the outermost whose outputs suffice later ops.

Mystique (Liang et al. 2023, section 4.2) replays operators at the top of the call tree, as they run
their children themselves. An op made of others (`CompositeImplicitAutograd`) may hide a tensor that
another op reads later, such as the mask of a dropout that its backward op takes. Such an op is
opened: its children are replayed in its place.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from predictor.trace.events import HostEvent, RankTrace
from predictor.trace.execution import Argument, ExecutionTrace, Node, Tensor, Value
from shardopt.replay.program.program import TensorSpec, nested
from shardopt.replay.program.schema import read_by
from shardopt.replay.program.tensors import tensors_of

NATIVE_BACKWARD = re.compile(r"torch::autograd::CppNode<.*?(Split\w*Lookup\w*)>")
"""A backward function in C++ that may launch kernels without passing through the dispatcher."""
FUSED = "fbgemm::"
GLOO = "gloo:"


@dataclass(frozen=True)
class ChosenOp:
    """An op to replay.

    Args:
        native: it is the backward function of a lookup, without an op of its own.
        section: annotations around it, the outermost first.
    """

    node: Node
    section: tuple[str, ...]
    native: bool = False


class Tree:
    """The calls of a trace."""

    def __init__(self, trace: ExecutionTrace) -> None:
        self.nodes = trace.nodes
        self.by_id = {node.id: node for node in trace.nodes}
        self.children: dict[int, list[Node]] = defaultdict(list)
        for node in trace.nodes:
            self.children[node.parent].append(node)
        self.roots = [node for node in trace.nodes if node.parent not in self.by_id]

    def above(self, node: Node) -> Iterator[Node]:
        """Yield the callers of a node, the nearest first."""
        visited = {node.id}
        while (parent := self.by_id.get(node.parent)) is not None and parent.id not in visited:
            visited.add(parent.id)
            yield parent
            node = parent

    def below(self, node: Node) -> Iterator[Node]:
        """Yield all nodes that a node calls, in order."""
        stack = [*reversed(self.children[node.id])]
        while stack:
            child = stack.pop()
            yield child
            stack.extend(reversed(self.children[child.id]))


def choose(trace: ExecutionTrace, composite: Callable[[str], bool]) -> list[ChosenOp]:
    """Return the ops to replay, in the order of their starts.

    Args:
        composite: True for the name of an op that is made of others, which can replace it.
    """
    tree = Tree(trace)
    opened: set[int] = set()
    while True:
        chosen = _drop_barrier_tensors(_drop_gloo(tree, _outermost(tree, opened)))
        more = _to_open(tree, chosen, composite)
        if not more:
            return chosen
        opened |= more


def views_of(arguments: Iterable[Argument]) -> set[TensorSpec]:
    """Return the views of storages that the tensors of some arguments are."""
    uses = (use for argument in arguments for use in tensors_of(argument) if use is not None)
    return {use.spec for use in uses if use.spec.storage}


def _outermost(tree: Tree, opened: set[int]) -> list[ChosenOp]:
    chosen = []
    around = _around_others(tree)
    stack = [(node, around.get(node.id, ())) for node in reversed(tree.roots)]
    while stack:
        node, section = stack.pop()
        if node.schema and node.id not in opened:
            chosen.append(ChosenOp(node, section))
            stack.extend((child, section) for child in reversed(_part_children(tree, node)[1]))
            continue
        if _is_native(tree, node):
            chosen.append(ChosenOp(node, section, native=True))
            continue
        if node.scope == USER and not node.schema:
            section = (*section, node.name)
        stack.extend((child, section) for child in reversed(tree.children[node.id]))
    chosen.sort(key=lambda op: op.node.id)
    return chosen


def _around_others(tree: Tree) -> dict[int, tuple[str, ...]]:
    """Map root nodes of other threads to the annotations then open on the annotated thread.

    The backward pass runs on a thread of autograd's, while the main one waits under its annotation.
    """
    users = {
        node.id: node.thread
        for node in tree.nodes
        if node.scope == USER and not node.schema and not node.name.startswith(GLOO)
    }
    sections: dict[int, tuple[str, ...]] = {}
    around: tuple[str, ...] = ()
    roots = {node.id for node in tree.roots}
    for node in tree.nodes if users else ():
        if node.thread == next(iter(users.values())):
            above = reversed([node, *tree.above(node)])
            around = tuple(caller.name for caller in above if caller.id in users)
        elif node.id in roots:
            sections[node.id] = around
    return sections


BARRIERS = frozenset({"c10d::barrier", "c10d::monitored_barrier_"})
FUNCTION, USER = 0, 7
"""Scopes of `at::RecordScope`."""
OWN = {
    "c10d::_reduce_scatter_base_": "(aten::clone )?",
    "c10d::reduce_scatter_": "(aten::(clone|copy_) ){0,%d}",
    "c10d::reduce_scatter_tensor_coalesced_": "(aten::clone ){0,%d}",
    "c10d::_allgather_base_": "(aten::chunk )?(aten::empty )?",
    "c10d::allgather_": "(aten::empty )?",
    "c10d::allgather_coalesced_": "(aten::empty )?",
    "c10d::allgather_into_tensor_coalesced_": "(aten::chunk ){0,%d}(aten::empty )?",
    "c10d::gather_": "(aten::empty )?",
    "c10d::scatter_": "(aten::empty )?",
    "c10d::monitored_barrier_": "(aten::empty )?",
}
"""Collective -> the ops that gloo runs for it before it returns (`ProcessGroupGloo.cpp`), as a
pattern of their names; `%d` is the length of its longest list of tensors."""


def _part_children(tree: Tree, node: Node) -> tuple[list[Node], list[Node]]:
    """Split a collective's children into its own calls and calls that came after it.

    gloo ends its record of a collective on another thread, and the observer then takes the next
    calls of the main thread for the collective's children.
    """
    children = tree.children[node.id]
    if not node.name.startswith("c10d::"):
        return children, []
    longest = max((sum(1 for _ in a.tensors()) for a in node.inputs), default=0)
    pattern = OWN.get(node.name, "").replace("%d", str(longest))
    match = re.match(pattern, "".join(f"{child.name} " for child in children))
    count = match[0].count(" ") if match else 0
    return children[:count], children[count:]


def _drop_gloo(tree: Tree, chosen: Sequence[ChosenOp]) -> list[ChosenOp]:
    """Leave out the ops that gloo runs later for a collective, on memory of its own.

    gloo runs them on its own threads, and on the thread that waits for a reduce-scatter.
    """
    if not any(node.name.startswith(GLOO) for node in tree.nodes):
        return list(chosen)
    busy = {node.thread for node in tree.nodes if not node.schema and node.scope != FUNCTION}
    own = {child.id for op in chosen for child in _own_calls(tree, op.node)}
    maker: dict[int, int] = {}
    at = 0
    remaining: list[ChosenOp] = []
    for op in chosen:
        while at < len(tree.nodes) and tree.nodes[at].id < op.node.id:
            maker.update(dict.fromkeys(_new_storages(tree.nodes[at]), tree.nodes[at].id))
            at += 1
        inputs = {view.storage for view in views_of(read_by(op.node))}
        if any(maker.get(store) in own for store in inputs):
            continue
        if busy and op.node.thread not in busy:
            continue
        # the record of an op may end early for the same reason; then its last child stands alone
        before = remaining[-1].node if remaining else op.node
        outputs = views_of(op.node.outputs)
        same = outputs == views_of(before.outputs)
        if outputs and same and _new_storages(op.node) and before.name != op.node.name:
            continue
        remaining.append(op)
    return _drop_unread(remaining)


def _drop_unread(chosen: Sequence[ChosenOp]) -> list[ChosenOp]:
    """Leave out the ops of a collective that a trace shows behind the collective.

    The trace shows them inside or behind, depending on when gloo's threads end their records. Such
    an op makes tensors that only gloo reads. An unread tensor of the program itself may be left out
    too.
    """
    remaining: list[ChosenOp] = []
    pattern = ""
    for at, op in enumerate(chosen):
        if f"{op.node.name} " in pattern and not _is_read(op.node, chosen[at + 1 :]):
            continue
        pattern = OWN.get(op.node.name, "")
        remaining.append(op)
    return remaining


def _is_read(node: Node, later: Sequence[ChosenOp]) -> bool:
    """Return True if a later op takes an output of this one before its storage is reused."""
    outputs, new = views_of(node.outputs), _new_storages(node)
    for op in later:
        if outputs & views_of(read_by(op.node)):
            return True
        if new & _new_storages(op.node):
            return False
    return False


def _drop_barrier_tensors(chosen: Sequence[ChosenOp]) -> list[ChosenOp]:
    """Leave out the empty tensor that a barrier makes before its record starts."""
    remaining: list[ChosenOp] = []
    for op in chosen:
        if op.node.name in BARRIERS and remaining and remaining[-1].node.name == "aten::empty":
            inputs = {view.storage for view in views_of(op.node.inputs)}
            if _new_storages(remaining[-1].node) & inputs:
                remaining.pop()
        remaining.append(op)
    return remaining


def _is_native(tree: Tree, node: Node) -> bool:
    if NATIVE_BACKWARD.match(node.name) is None:
        return False
    return not any(child.name.startswith(FUSED) and child.schema for child in tree.below(node))


def _own_calls(tree: Tree, node: Node) -> list[Node]:
    if not node.name.startswith("c10d::"):
        return []
    children = _part_children(tree, node)[0]
    return [*children, *(inner for child in children for inner in tree.below(child))]


def _new_storages(node: Node) -> set[int]:
    """Return the storages that an op gives and did not take."""
    outputs, inputs = views_of(node.outputs), views_of(node.inputs)
    return {view.storage for view in outputs} - {view.storage for view in inputs}


def _to_open(tree: Tree, chosen: Sequence[ChosenOp], composite: Callable[[str], bool]) -> set[int]:
    """Return the composite ops that hide a tensor which a later chosen op reads."""
    hidden: dict[int, dict[TensorSpec, Node]] = defaultdict(dict)
    more: set[int] = set()
    for op in chosen:
        node = op.node
        inputs, outputs = views_of(read_by(node)), views_of(node.outputs)
        for view in inputs:
            owner = hidden[view.storage].pop(view, None)
            if owner is not None:
                more.add(owner.id)
        before = {view.storage for view in inputs}
        for view in outputs:
            if view.storage in before:
                hidden[view.storage].pop(view, None)
            else:
                hidden.pop(view.storage, None)
        if op.native or not composite(node.name):
            continue
        for child in tree.below(node):
            for view in views_of(child.outputs) - inputs - outputs:
                hidden[view.storage][view] = node
    return more


def fix_callers(trace: ExecutionTrace, times: RankTrace | None) -> ExecutionTrace:
    """Return the trace with the callers that its Kineto trace shows, if gloo took part.

    gloo ends its records on its own threads, after which the observer takes later ops for children
    of whatever record was open. Spans of the Kineto trace nest on their thread in any case.
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
    """Open ops of functional collectives and tensor subclasses, and unwrap their tensors."""
    open_ids = {node.parent for node in trace.nodes if node.name == SUBCLASS}
    open_ids |= {node.id for node in trace.nodes if node.name.startswith(FUNCTIONAL)}
    if not open_ids:
        return trace
    return replace(trace, nodes=tuple(_nodes(trace, open_ids)))


def _nodes(trace: ExecutionTrace, open_ids: set[int]) -> Iterator[Node]:
    inside: dict[int, Tensor] = {}

    def unwrapped(value: Value) -> Value:
        return inside.get(value.id, value) if isinstance(value, Tensor) else value

    for node in trace.nodes:
        read, outputs = (
            [tensor for argument in side for tensor in argument.tensors()]
            for side in (node.inputs, node.outputs)
        )
        if node.name == WRAPPED:
            inside |= {outer.id: inner for inner, outer in zip(read, outputs, strict=False)}
        if node.id in open_ids:
            yield replace(node, schema="")
            continue
        for tensor in outputs:
            inside.pop(tensor.id, None)
        if inside:
            inputs = (replace(a, value=nested(unwrapped, a.value)) for a in node.inputs)
            node = replace(node, inputs=tuple(inputs))
        yield node
