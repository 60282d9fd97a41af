"""Traces with names and values that no PyTorch writes: what is generated is a program that runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
from dataclasses import replace

from hypothesis import assume, given
from hypothesis import strategies as st

from predictor.trace.events import CollectiveCall
from predictor.trace.execution import COMMS, Node
from shardopt.replay.generate import generate
from shardopt.replay.program.build import (
    PUBLIC,
    Annotations,
    gradient_of,
    pair_lookups,
    recorded_collective,
)
from shardopt.replay.program.select import ChosenOp, Tree
from tests.shardopt.cli.fuzz import check_programs
from tests.shardopt.replay.nodes import note, op, plain, tensor, trace

LINE = [1, 2, 0, 4, 4, "cpu"]


def node(number: int, name: str, schema: str, inputs: list[list[Any]]) -> dict[str, Any]:
    """An op; inputs as (value, shape, type)."""
    sides: dict[str, list[list[Any]]] = {"input": inputs, "output": [[LINE, [4], "Tensor(float)"]]}
    flat = {
        f"{side}{ending}": [arguments[at] for arguments in attributes]
        for side, attributes in sides.items()
        for at, ending in enumerate(("s", "_shapes", "_types"))
    }
    more = {"rf_id": number, "seq_id": -1, "scope": 0, "tid": 1, "fw_parent": 0}
    return {"id": number, "parent": 2, "name": name, "op_schema": schema, **more, **flat}


TENSOR = [LINE, [4], "Tensor(float)"]
RELU = ("aten::relu", "aten::relu(Tensor self) -> Tensor", [TENSOR])
HOSTILE: dict[str, tuple[str, str, list[list[Any]]]] = {
    "no namespace": ("main", "main(Tensor self) -> Tensor", [TENSOR]),
    "the list of ops": ("ops", "ops(Tensor self) -> Tensor", [TENSOR]),
    "keyword": ("lambda", "lambda(Tensor self) -> Tensor", [TENSOR]),
    "collective": ("c10d::main", "c10d::main(Tensor[] x) -> Tensor", [TENSOR]),
    "collective keyword": ("c10d::lambda_", "c10d::lambda_(Tensor[] x) -> Tensor", [TENSOR]),
    "a part": ("part::0_part", "part::0_part(Tensor self) -> Tensor", [TENSOR]),
    "dunder": ("_::name__", "_::name__(Tensor self) -> Tensor", [TENSOR]),
    "not ASCII": ("aten::名", "aten::名(Tensor self) -> Tensor", [TENSOR]),
    "surrogate": ("aten::\ud800", "aten::\ud800(Tensor self) -> Tensor", [TENSOR]),
    "line": ("aten::a\nimport os", "aten::a\nimport os(Tensor self) -> Tensor", [TENSOR]),
    "parameter": ("x::y", "x::y(Tensor self, *, int lambda) -> Tensor", [TENSOR, [1, [], "Int"]]),
    "tensor parameter": ("x::y", "x::y(*, Tensor lambda) -> Tensor", [TENSOR]),
    "digits": ("x::y", "x::y(*, int 1x) -> Tensor", [[1, [], "Int"]]),
    "tensor for a number": ("x::y", "x::y(Tensor self, int n) -> Tensor", [TENSOR, TENSOR]),
    "tensors for numbers": (
        "x::y",
        "x::y(int[] n) -> Tensor",
        [[[LINE, LINE], [[4], [4]], "GenericList[Tensor(float),Tensor(float)]"]],
    ),
    "long number": ("x::y", "x::y(int n) -> Tensor", [[10**400, [], "Int"]]),
    "text for a number": ("x::y", "x::y(int n) -> Tensor", [["open('x')", [], "String"]]),
}


def written(folder: Path, *ops: tuple[str, str, list[list[Any]]]) -> Path:
    document = {
        "schema": "1.0.1",
        "pid": 1,
        "nodes": [node(10 + at, *op) for at, op in enumerate(ops)],
    }
    path = folder / "et.json"
    path.write_text(json.dumps(document))
    generate([path], folder / "b")
    return folder / "b" / "benchmark.py"


@pytest.mark.parametrize("name", HOSTILE)
def test_the_program_is_one(name: str, tmp_path: Path) -> None:
    check_programs(written(tmp_path, RELU, HOSTILE[name], RELU).parent)


def test_the_program_of_all_of_them_runs(tmp_path: Path) -> None:
    harmless = [op for name, op in HOSTILE.items() if "collective" not in name]
    path = written(tmp_path, RELU, *harmless, RELU)
    words = [sys.executable, str(path), "--device", "cpu", "--iterations", "2", "--warm-up", "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)


SGD = "fbgemm::split_embedding_codegen_lookup_sgd_function"
ADAM = "fbgemm::split_embedding_codegen_lookup_adam_function"
DENSE = "fbgemm::dense_embedding_codegen_lookup_function"


def lookup(number: int, name: str, shape: tuple[int, ...], weights: int = 60) -> Node:
    return op(number, name, [tensor(number, 100, (weights,))], [tensor(number, 200, shape)])


def backward(number: int, kind: str, shape: tuple[int, ...]) -> Node:
    name = f"torch::autograd::CppNode<{kind}>"
    return note(number, name, scope=1, inputs=[tensor(number, 300, shape)])


def pairs(*nodes: Node) -> dict[int, int]:
    """Backward function -> lookup, by their ids."""
    pair_of = pair_lookups(ChosenOp(n, (), native=n.scope == 1) for n in nodes)
    return {number: node.id for number, node in pair_of.items()}


def test_a_backward_function_belongs_to_the_last_lookup_of_its_kind_and_shape() -> None:
    lookups = [lookup(1, SGD, (4, 8)), lookup(2, SGD, (4, 8)), lookup(3, SGD, (4, 16))]
    back = [backward(n, "SplitLookupFunction_sgd_Op", (4, 8)) for n in (10, 11)]
    # backward functions run in the opposite order
    assert pairs(*lookups, lookup(4, ADAM, (4, 8)), *back) == {10: 2, 11: 1}
    assert not pairs(lookup(1, SGD, (4, 9)), back[0])
    # a lookup after it is none of its own
    assert not pairs(back[0], lookup(11, SGD, (4, 8)))


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
    assert pairs(lookup(1, name, (4, 8)), back) == {10: 1}
    assert not pairs(lookup(1, SGD, (4, 8)), back)


def test_the_gradient_of_the_weights() -> None:
    back = backward(10, "SplitLookupFunction_Dense_Op", (4, 8))
    empty_op = op(11, "aten::empty", [], [tensor(20, 400, (4, 8))], parent=10)
    zeros = op(12, "aten::zeros", [], [tensor(21, 401, (60,))], parent=10)
    forward = lookup(1, DENSE, (4, 8))
    gradient = gradient_of(Tree(trace(forward, back, empty_op, zeros)), back, forward)
    assert gradient is not None
    assert gradient.tensor.storage == 401
    assert gradient_of(Tree(trace(forward, back, empty_op)), back, forward) is None
    # the fused kinds step the weights themselves: they make none
    empty = op(12, "aten::zeros", [], [tensor(21, 401, (0,))], parent=10)
    fused = lookup(1, DENSE, (4, 8), weights=0)
    assert gradient_of(Tree(trace(fused, back, empty)), back, fused) is None


def test_what_a_collective_says_of_its_group_and_number() -> None:
    sent = op(1, "c10d::allreduce_", [tensor(1, 2)])
    inner = note(2, "inner", parent=1)
    record = note(3, COMMS, parent=2, scope=0, inputs=[tensor(1, 2), plain(17), plain("pg", "S")])
    with_comm = replace(record, comm=CollectiveCall("all_reduce", 24, (0, 2), output_bytes=24))
    assert recorded_collective(Tree(trace(sent, inner, with_comm)), sent) == ((0, 2), 17)
    assert recorded_collective(Tree(trace(sent, inner)), sent) == ((), None)
    # older traces have no number in that place
    named = replace(with_comm, inputs=(tensor(1, 2), plain("pg", "String")))
    assert recorded_collective(Tree(trace(sent, inner, named)), sent) == ((0, 2), None)


LIBRARY = [
    "ProfilerStep#12",
    "Optimizer.step#Adam.step",
    "Optimizer.zero_grad#SGD.zero_grad",
    "DistributedDataParallel.forward",
    "## forward ##",
    "## all2all_data:kjt splits ##",
    "## EmbeddingBagCollectionAwaitable wait() ##",
]
OWN = [
    "forward",
    "## train_alice ##",
    "Optimizer.step#AliceOptimizer.step",
    "ProfilerStep#12 alice",
    "ProfilerStep#alice",
    "alice ## forward ##",
    "## forward ##\nalice",
    "DistributedDataParallel.forward of alice",
    "",
]


@pytest.mark.parametrize("name", [*LIBRARY, *OWN])
def test_only_names_of_the_libraries_stay(name: str) -> None:
    annotations = Annotations()
    assert annotations(name) == (name if name in LIBRARY else "annotation 1")
    assert annotations.replaced == (name in OWN)
    assert Annotations([name])(name) == name


@given(st.lists(st.text(min_size=1)))
def test_a_number_a_name(names: list[str]) -> None:
    assume(not any(PUBLIC.match(name) for name in names))
    annotations = Annotations()
    written = dict(zip(names, map(annotations, names), strict=True))
    assert [annotations(name) for name in names] == [written[name] for name in names]
    # told apart, and by nothing of their own
    assert set(written.values()) == {f"annotation {i + 1}" for i in range(len(written))}
    assert annotations.replaced == len(written)
