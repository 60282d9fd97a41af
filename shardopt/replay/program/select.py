"""Which ops of an execution trace are replayed: the outermost that have all that later ops read.

Mystique (Liang et al. 2023, section 4.2) replays operators at the top of the call tree, as their
children run by themselves. An op made of others (`CompositeImplicitAutograd`) may hide a tensor
that another op reads later, such as the mask of a dropout that its backward op takes. Such an op is
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
        """The callers of a node, the nearest first."""
        seen = {node.id}
        while (parent := self.by_id.get(node.parent)) is not None and parent.id not in seen:
            seen.add(parent.id)
            yield parent
            node = parent

    def below(self, node: Node) -> Iterator[Node]:
        """All that a node calls, in order."""
        stack = [*reversed(self.children[node.id])]
        while stack:
            child = stack.pop()
            yield child
            stack.extend(reversed(self.children[child.id]))


def choose(trace: ExecutionTrace, composite: Callable[[str], bool]) -> list[ChosenOp]:
    """The ops to replay, in the order of their starts.

    Args:
        composite: of the name of an op: it is made of others, which can stand for it.
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
    """How the tensors of some arguments see their storages."""
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
    chosen.sort(key=lambda of: of.node.id)
    return chosen


def _around_others(tree: Tree) -> dict[int, tuple[str, ...]]:
    """Of what a thread starts by itself: the annotations of the thread that has them.

    The backward pass runs on a thread of autograd's, while the other waits under its annotation.
    """
    users = {
        node.id: node.thread
        for node in tree.nodes
        if node.scope == USER and not node.schema and not node.name.startswith(GLOO)
    }
    found: dict[int, tuple[str, ...]] = {}
    around: tuple[str, ...] = ()
    roots = {node.id for node in tree.roots}
    for node in tree.nodes if users else ():
        if node.thread == next(iter(users.values())):
            above = reversed([node, *tree.above(node)])
            around = tuple(of.name for of in above if of.id in users)
        elif node.id in roots:
            found[node.id] = around
    return found


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
    """What a collective runs itself, and what a trace shows inside it though it came after it.

    gloo ends its record of a collective on another thread, and the observer then takes what the
    main thread does next for the collective's children.
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
    """Leave out what gloo runs later for a collective: it works on memory of its own.

    That is on its threads, and on the one that waits for a reduce-scatter.
    """
    if not any(node.name.startswith(GLOO) for node in tree.nodes):
        return list(chosen)
    busy = {node.thread for node in tree.nodes if not node.schema and node.scope != FUNCTION}
    own = {child.id for of in chosen for child in _own_calls(tree, of.node)}
    maker: dict[int, int] = {}
    at = 0
    kept: list[ChosenOp] = []
    for of in chosen:
        while at < len(tree.nodes) and tree.nodes[at].id < of.node.id:
            maker.update(dict.fromkeys(_new_storages(tree.nodes[at]), tree.nodes[at].id))
            at += 1
        taken = {view.storage for view in views_of(read_by(of.node))}
        if any(maker.get(store) in own for store in taken):
            continue
        if busy and of.node.thread not in busy:
            continue
        # the record of an op may end early for the same reason; then its last child stands alone
        before = kept[-1].node if kept else of.node
        made = views_of(of.node.outputs)
        same = made == views_of(before.outputs)
        if made and same and _new_storages(of.node) and before.name != of.node.name:
            continue
        kept.append(of)
    return _drop_unread(kept)


def _drop_unread(chosen: Sequence[ChosenOp]) -> list[ChosenOp]:
    """Leave out what a collective runs itself, if a trace shows it behind the collective.

    Whether it stands inside depends on when gloo's threads end their records. It makes tensors
    that only gloo reads; one of the program's own that nothing reads is as well left out.
    """
    kept: list[ChosenOp] = []
    pattern = ""
    for at, of in enumerate(chosen):
        if f"{of.node.name} " in pattern and not _is_read(of.node, chosen[at + 1 :]):
            continue
        pattern = OWN.get(of.node.name, "")
        kept.append(of)
    return kept


def _is_read(node: Node, later: Sequence[ChosenOp]) -> bool:
    """Whether a later op takes what this one gives, before its storage is used anew."""
    given, new = views_of(node.outputs), _new_storages(node)
    for of in later:
        if given & views_of(read_by(of.node)):
            return True
        if new & _new_storages(of.node):
            return False
    return False


def _drop_barrier_tensors(chosen: Sequence[ChosenOp]) -> list[ChosenOp]:
    """Leave out the empty tensor that a barrier makes for itself before its record starts."""
    kept: list[ChosenOp] = []
    for of in chosen:
        if of.node.name in BARRIERS and kept and kept[-1].node.name == "aten::empty":
            taken = {view.storage for view in views_of(of.node.inputs)}
            if _new_storages(kept[-1].node) & taken:
                kept.pop()
        kept.append(of)
    return kept


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
    """Storages that an op gives and did not take."""
    given, taken = views_of(node.outputs), views_of(node.inputs)
    return {view.storage for view in given} - {view.storage for view in taken}


def _to_open(tree: Tree, chosen: Sequence[ChosenOp], composite: Callable[[str], bool]) -> set[int]:
    """Composite ops that hide a tensor which a later chosen op reads."""
    hidden: dict[int, dict[TensorSpec, Node]] = defaultdict(dict)
    more: set[int] = set()
    for of in chosen:
        node = of.node
        taken, given = views_of(read_by(node)), views_of(node.outputs)
        for view in taken:
            owner = hidden[view.storage].pop(view, None)
            if owner is not None:
                more.add(owner.id)
        before = {view.storage for view in taken}
        for view in given:
            if view.storage in before:
                hidden[view.storage].pop(view, None)
            else:
                hidden.pop(view.storage, None)
        if of.native or not composite(node.name):
            continue
        for child in tree.below(node):
            for view in views_of(child.outputs) - taken - given:
                hidden[view.storage][view] = node
    return more


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

    def unwrapped(value: Value) -> Value:
        return inside.get(value.id, value) if isinstance(value, Tensor) else value

    for node in trace.nodes:
        taken, given = (
            [tensor for argument in side for tensor in argument.tensors()]
            for side in (node.inputs, node.outputs)
        )
        if node.name == WRAPPED:
            inside |= {outer.id: inner for inner, outer in zip(taken, given, strict=False)}
        if node.id in open_ids:
            yield replace(node, schema="")
            continue
        for tensor in given:
            inside.pop(tensor.id, None)
        if inside:
            inputs = (replace(a, value=nested(unwrapped, a.value)) for a in node.inputs)
            node = replace(node, inputs=tuple(inputs))
        yield node
