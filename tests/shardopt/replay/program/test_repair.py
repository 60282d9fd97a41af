"""Callers of ops from the times of a Kineto trace."""

from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from predictor.trace.events import HostEvent, RankTrace
from predictor.trace.execution import ExecutionTrace
from shardopt.replay.program.repair import fix_callers
from tests.shardopt.replay.nodes import note, op, trace

GLOO = note(99, "gloo:all_to_all", scope=0)


def rank(*events: HostEvent) -> RankTrace:
    return RankTrace("kineto.json", 0, 1, None, tuple(events), (), ())


def event(node: int | None, start: float, end: float, thread: int = 1, name: str = "f"):
    return HostEvent(name, "op", thread, start, end, node=node)


def parents(of: ExecutionTrace) -> dict[int, int]:
    return {node.id: node.parent for node in of.nodes}


def test_spans_tell_who_called() -> None:
    wrong = trace(op(1, "a::f"), op(2, "a::g", parent=1), op(3, "a::h", parent=2), GLOO)
    times = rank(event(1, 0, 4), event(2, 5, 20), event(3, 6, 7))
    assert parents(fix_callers(wrong, times)) == {1: 0, 2: 0, 3: 2, 99: 0}


def test_threads_nest_apart() -> None:
    nodes = trace(op(1, "a::f"), op(2, "a::g", parent=1), GLOO)
    times = rank(event(1, 0, 10, thread=1), event(2, 2, 3, thread=2))
    assert parents(fix_callers(nodes, times))[2] == 0


def test_equal_spans_nest_by_number() -> None:
    nodes = trace(op(1, "a::f", parent=2), op(2, "a::g"), GLOO)
    assert parents(fix_callers(nodes, rank(event(2, 1, 5), event(1, 1, 5)))) == {1: 0, 2: 1, 99: 0}


def test_what_gloo_records_calls_nothing() -> None:
    """Its span ends on another thread, long after what the main one did next."""
    nodes = trace(op(1, "c10d::send"), op(2, "aten::relu", parent=1), GLOO)
    times = rank(event(1, 0, 2), event(99, 1, 50, name="gloo:send"), event(2, 3, 4))
    assert parents(fix_callers(nodes, times)) == {1: 0, 2: 0, 99: 0}


def test_traces_without_gloo_or_times_stay() -> None:
    nodes = trace(op(1, "a::f"), op(2, "a::g", parent=1))
    assert fix_callers(nodes, rank(event(2, 5, 6), event(1, 0, 1))) is nodes
    with_gloo = trace(*nodes.nodes, GLOO)
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
    found = fix_callers(trace(*mixed, replace(GLOO, id=10_000)), rank(*spans.events))
    assert {n: p for n, p in parents(found).items() if n < 10_000} == spans.parents
