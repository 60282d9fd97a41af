"""Lookups and their backward functions in C++."""

from dataclasses import replace

import pytest

from predictor.trace.comms import CommInfo
from predictor.trace.execution import COMMS, Node
from shardopt.replay.program.native import NativePairs
from shardopt.replay.program.select import ChosenOp
from tests.shardopt.replay.nodes import note, op, plain, tensor, trace

SGD = "fbgemm::split_embedding_codegen_lookup_sgd_function"
ADAM = "fbgemm::split_embedding_codegen_lookup_adam_function"
DENSE = "fbgemm::dense_embedding_codegen_lookup_function"


def lookup(number: int, name: str, shape: tuple[int, ...], weights: int = 60) -> Node:
    return op(number, name, [tensor(number, 100, (weights,))], [tensor(number, 200, shape)])


def backward(number: int, kind: str, shape: tuple[int, ...]) -> Node:
    name = f"torch::autograd::CppNode<{kind}>"
    return note(number, name, scope=1, inputs=[tensor(number, 300, shape)])


def pairs(*nodes: Node) -> NativePairs:
    chosen = [ChosenOp(n, (), native=n.scope == 1) for n in nodes if not n.parent]
    return NativePairs(chosen, trace(*nodes))


def of(node: Node) -> ChosenOp:
    return ChosenOp(node, (), native=True)


def test_a_backward_function_belongs_to_the_last_lookup_of_its_kind_and_shape() -> None:
    first, second = lookup(1, SGD, (4, 8)), lookup(2, SGD, (4, 8))
    wide, adam = lookup(3, SGD, (4, 16)), lookup(4, ADAM, (4, 8))
    back = [backward(n, "SplitLookupFunction_sgd_Op", (4, 8)) for n in (10, 11)]
    found = pairs(first, second, wide, adam, *back)
    found.handles = {1: 71, 2: 72, 3: 73, 4: 74}
    # backward functions run in the opposite order
    assert [found.handle_of(of(node)) for node in back] == [72, 71]
    assert found.forward.keys() == {1, 2}
    assert found.name_of(of(back[0])) == f"backward of {SGD}"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (DENSE, "SplitLookupFunction_Dense_Op"),
        (ADAM, "SplitLookupFunction_adam_Op"),
        (ADAM, "SplitNoBagLookupFunction_adam_Op"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    back = backward(10, kind, (4, 8))
    assert pairs(lookup(1, name, (4, 8)), back).forward.keys() == {1}
    assert not pairs(lookup(1, SGD, (4, 8)), back).forward


def test_a_backward_function_without_its_lookup() -> None:
    back = backward(10, "SplitLookupFunction_sgd_Op", (4, 8))
    found = pairs(lookup(1, SGD, (4, 9)), back)
    assert not found.forward
    assert found.handle_of(of(back)) is None
    # a lookup after it is none of its own
    assert not pairs(back, lookup(11, SGD, (4, 8))).forward


def test_the_gradient_of_the_weights() -> None:
    back = backward(10, "SplitLookupFunction_Dense_Op", (4, 8))
    other = op(11, "aten::empty", [], [tensor(20, 400, (4, 8))], parent=10)
    zeros = op(12, "aten::zeros", [], [tensor(21, 401, (60,))], parent=10)
    forward = lookup(1, DENSE, (4, 8))
    found = pairs(forward, back, other, zeros).gradient(of(back))
    assert found is not None
    assert found.tensor.storage == 401
    assert pairs(forward, back, other).gradient(of(back)) is None
    # the fused kinds step the weights themselves: they make none
    empty = op(12, "aten::zeros", [], [tensor(21, 401, (0,))], parent=10)
    assert pairs(lookup(1, DENSE, (4, 8), weights=0), back, empty).gradient(of(back)) is None


def test_what_a_collective_says_of_its_group_and_number() -> None:
    sent = op(1, "c10d::allreduce_", [tensor(1, 2)])
    record = note(3, COMMS, parent=2, scope=0, inputs=[tensor(1, 2), plain(17), plain("pg", "S")])
    told = replace(record, comm=CommInfo("all_reduce", 24, 24, (0, 2)))
    found = pairs(sent, note(2, "inner", parent=1), told)
    assert found.tree_comm(sent) == (0, 2)
    assert found.sequence(sent) == 17
    bare = pairs(sent, note(2, "inner", parent=1))
    assert bare.tree_comm(sent) == ()
    assert bare.sequence(sent) is None
    # older traces have no number in that place
    named = replace(told, inputs=(tensor(1, 2), plain("pg", "String")))
    assert pairs(sent, note(2, "inner", parent=1), named).sequence(sent) is None
