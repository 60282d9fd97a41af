"""Which ops of a trace are replayed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.trace.events import HostEvent, RankTrace
from predictor.trace.execution import ExecutionTrace, Node
from shardopt.replay.program.select import Tree, choose, fix_callers
from tests.shardopt.replay.nodes import note, op, plain, tensor, trace

MADE = "made of others"


def names(*nodes: Node) -> list[str]:
    return [chosen.node.name for chosen in choose(trace(*nodes), lambda name: name == MADE)]


def test_the_outermost_ops_in_order() -> None:
    assert names(
        op(1, "aten::linear", [tensor(1, 2)], [tensor(3, 4)]),
        op(2, "aten::t", [tensor(1, 2)], [tensor(5, 2)], parent=1),
        note(3, "forward"),
        op(4, "aten::relu", [tensor(3, 4)], [tensor(6, 7)], parent=3),
    ) == ["aten::linear", "aten::relu"]


def test_annotations_around_an_op() -> None:
    chosen_ops = choose(
        trace(
            note(1, "outer"),
            note(2, "inner", parent=1),
            # what autograd calls is no annotation
            note(3, "autograd::engine::evaluate_function", parent=2, scope=0),
            op(4, "aten::mm", [tensor(1, 2)], [tensor(3, 4)], parent=3),
        ),
        lambda _: False,
    )
    assert [chosen.section for chosen in chosen_ops] == [("outer", "inner")]


def composite(*inside: Node, reads: Node) -> list[str]:
    outer = op(1, MADE, [tensor(1, 2)], [tensor(3, 4)])
    return names(outer, *inside, reads)


def test_a_composite_op_that_hides_what_is_read_later_is_opened() -> None:
    mask = op(2, "aten::bernoulli_", [tensor(1, 2)], [tensor(5, 6)], parent=1)
    product = op(3, "aten::mul", [tensor(1, 2), tensor(5, 6)], [tensor(3, 4)], parent=1)
    # as another object, since autograd kept it
    back = op(9, "aten::masked", [tensor(7, 6)], [tensor(8, 10)])
    assert composite(mask, product, reads=back) == ["aten::bernoulli_", "aten::mul", "aten::masked"]


def test_an_op_of_its_own_is_not_opened() -> None:
    inside = op(2, "aten::empty", [], [tensor(5, 6)], parent=1)
    outer = op(1, "aten::kernel", [tensor(1, 2)], [tensor(3, 4)])
    back = op(9, "aten::back", [tensor(7, 6)], [tensor(8, 10)])
    assert names(outer, inside, back) == ["aten::kernel", "aten::back"]


def test_what_the_op_gives_opens_nothing() -> None:
    inside = op(2, "aten::mm", [tensor(1, 2)], [tensor(3, 4)], parent=1)
    back = op(9, "aten::back", [tensor(7, 4), tensor(1, 2)], [tensor(8, 10)])
    assert composite(inside, reads=back) == [MADE, "aten::back"]


def test_memory_that_another_op_has_taken_since_opens_nothing() -> None:
    hidden = op(2, "aten::empty", [], [tensor(5, 6)], parent=1)
    outer = op(1, MADE, [tensor(1, 2)], [tensor(3, 4)])
    again = op(8, "aten::ones", [], [tensor(5, 6)])
    reads = op(9, "aten::back", [tensor(5, 6)], [tensor(8, 10)])
    assert names(outer, hidden, again, reads) == [MADE, "aten::ones", "aten::back"]


MUL = "aten::mul_.Tensor(Tensor(a!) self, Tensor other) -> Tensor(a!)"


@pytest.mark.parametrize("kind", ["double", "long int"])
def test_a_python_number_in_memory_of_before_opens_nothing(kind: str) -> None:
    """No recorded op makes its tensor, so that its memory may be that of a hidden one."""
    hidden = op(2, "aten::empty_like", [], [tensor(5, 6, (), "long int")], parent=1)
    numbered = op(
        9, "aten::mul_", [tensor(1, 2), tensor(7, 6, (), kind)], [tensor(1, 2)], schema=MUL
    )
    assert composite(hidden, reads=numbered) == [MADE, "aten::mul_"]


GLOO = note(90, "gloo:all_reduce", scope=0)


def test_what_came_after_a_collective_is_taken_out_of_it() -> None:
    """gloo ends its record on another thread: what the main one runs next seems to be inside."""
    sent = op(1, "c10d::_allgather_base_", [tensor(1, 2)], [tensor(3, 4)])
    own = op(2, "aten::chunk", [tensor(3, 4)], [tensor(5, 4)], parent=1)
    after = op(3, "aten::relu", [tensor(3, 4)], [tensor(6, 7)], parent=1)
    assert names(sent, own, after, GLOO) == ["c10d::_allgather_base_", "aten::relu"]


@pytest.mark.parametrize("read", [False, True])
def test_what_a_collective_made_for_itself_is_left_out_where_nothing_reads_it(read: bool) -> None:
    sent = op(1, "c10d::_allgather_base_", [tensor(1, 2)], [tensor(3, 4)])
    own = op(2, "aten::empty", [], [tensor(5, 6)])
    after = op(3, "aten::relu", [tensor(5, 6) if read else tensor(3, 4)], [tensor(7, 8)])
    again = op(4, "aten::empty", [], [tensor(9, 6)])
    later = op(5, "aten::relu", [tensor(9, 6)], [tensor(10, 11)])
    rest = ["aten::relu", "aten::empty", "aten::relu"]
    expected = ["c10d::_allgather_base_", *(["aten::empty"] if read else []), *rest]
    assert names(sent, own, after, again, later, GLOO) == expected


def test_what_gloo_does_on_its_threads_is_left_out() -> None:
    main = note(1, "forward")
    sent = op(2, "c10d::allreduce_", [tensor(1, 2)], [tensor(1, 2)], parent=1)
    on_thread = op(3, "aten::add_", [tensor(8, 9)], [tensor(8, 9)], thread=2)
    after = op(4, "aten::relu", [tensor(1, 2)], [tensor(5, 6)], parent=1)
    assert names(main, sent, on_thread, after, GLOO) == ["c10d::allreduce_", "aten::relu"]
    # without gloo another thread may be autograd's
    assert "aten::add_" in names(main, sent, on_thread, after)


def test_native_backward_functions() -> None:
    name = "torch::autograd::CppNode<SplitLookupFunction_sgd_Op>"
    bare = note(1, name, scope=1, inputs=[tensor(1, 2)])
    (chosen,) = choose(trace(bare, note(2, "aten::empty", parent=1)), lambda _: False)
    assert chosen.native
    backward = op(2, "fbgemm::split_embedding_backward", [tensor(1, 2)], [tensor(3, 4)], parent=1)
    (chosen,) = choose(trace(bare, backward), lambda _: False)
    assert not chosen.native
    assert chosen.node == backward


def test_callers_that_lead_round_in_a_circle() -> None:
    tree = Tree(trace(op(1, "a::f", parent=2), op(2, "a::g", parent=1)))
    assert [node.id for node in tree.above(tree.by_id[1])] == [2]
    assert [n.id for n in Tree(trace(note(1, "x"), op(2, "f", [plain(1)], parent=1))).roots] == [1]


ALL_TO_ALL = note(99, "gloo:all_to_all", scope=0)


def rank(*events: HostEvent) -> RankTrace:
    return RankTrace("kineto.json", 0, 1, None, tuple(events), (), ())


def event(node: int | None, start: float, end: float, thread: int = 1, name: str = "f"):
    return HostEvent(name, "op", thread, start, end, node=node)


def parents(trace_: ExecutionTrace) -> dict[int, int]:
    return {node.id: node.parent for node in trace_.nodes}


def test_equal_spans_nest_by_number() -> None:
    nodes = trace(op(1, "a::f", parent=2), op(2, "a::g"), ALL_TO_ALL)
    assert parents(fix_callers(nodes, rank(event(2, 1, 5), event(1, 1, 5)))) == {1: 0, 2: 1, 99: 0}


def test_what_gloo_records_calls_nothing() -> None:
    """Its span ends on another thread, long after what the main one did next."""
    nodes = trace(op(1, "c10d::send"), op(2, "aten::relu", parent=1), ALL_TO_ALL)
    times = rank(event(1, 0, 2), event(99, 1, 50, name="gloo:send"), event(2, 3, 4))
    assert parents(fix_callers(nodes, times)) == {1: 0, 2: 0, 99: 0}


def test_traces_without_gloo_or_times_stay() -> None:
    nodes = trace(op(1, "a::f"), op(2, "a::g", parent=1))
    assert fix_callers(nodes, rank(event(2, 5, 6), event(1, 0, 1))) is nodes
    with_gloo = trace(*nodes.nodes, ALL_TO_ALL)
    assert fix_callers(with_gloo, None) is with_gloo
    # without a time the recorded caller is all there is
    assert parents(fix_callers(with_gloo, rank(event(1, 0, 1)))) == parents(with_gloo)


@dataclass
class Spans:
    """Calls on threads, and what called each."""

    events: list[HostEvent] = field(default_factory=list)
    parents: dict[int, int] = field(default_factory=dict)
    clock: float = 0.0

    def add(self, tree: list, thread: int, parent: int) -> None:
        for inner in tree:
            number, start = len(self.parents) + 1, self.clock
            self.parents[number] = parent
            self.clock += 1
            self.add(inner, thread, number)
            self.events.append(event(number, start, self.clock, thread))
            self.clock += 1


TREES = st.recursive(st.just([]), lambda inner: st.lists(inner, max_size=4), max_leaves=12)


@given(st.lists(TREES, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_intervals_become_their_tree(threads: list[list], random) -> None:
    spans = Spans()
    for thread, tree in enumerate(threads):
        spans.add(tree, thread + 1, 0)
    numbers = [*spans.parents, 0]
    mixed = [op(n, f"a::f{n}", parent=random.choice(numbers)) for n in spans.parents]
    random.shuffle(spans.events)
    fixed = fix_callers(trace(*mixed, replace(ALL_TO_ALL, id=10_000)), rank(*spans.events))
    assert {n: p for n, p in parents(fixed).items() if n < 10_000} == spans.parents
