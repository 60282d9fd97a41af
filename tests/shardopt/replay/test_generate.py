"""Programs out of traces: which ops, which tensors, and what is left out."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from predictor.errors import InputError
from predictor.trace.execution import ExecutionTrace
from predictor.trace.read import load_traces
from shardopt.replay.generate import generate, is_composite, program_of
from shardopt.replay.program.build import Annotations
from shardopt.replay.program.program import leaves
from shardopt.replay.program.select import choose
from tests.predictor.trace import synthetic
from tests.public_data import TRACES, needs_public_data
from tests.shardopt.replay.captured import attribute, edited, program
from tests.shardopt.replay.differences import check_runs


def test_hidden_tensors_open_the_ops_that_hide_them(traces: Path) -> None:
    names = [call.op for call in program(traces).calls]
    assert "aten::conv2d" in names
    # the mask of the dropout and the indices of the pooling are read by their backward ops
    assert "aten::dropout" not in names
    assert "aten::max_pool2d" not in names
    for op in ("aten::bernoulli_", "aten::max_pool2d_with_indices", "aten::convolution_backward"):
        assert op in names


def test_tensors_come_from_the_ops_that_gave_them(traces: Path) -> None:
    recorded = program(traces)
    check_runs(recorded)
    pool = next(c for c in recorded.calls if c.op == "aten::max_pool2d_with_indices")
    back = next(c for c in recorded.calls if c.op == "aten::max_pool2d_with_indices_backward")
    assert set(pool.gives()) & set(back.reads())
    # whatever an op gives is let go of, and nothing else
    assert {n for c in recorded.calls for n in c.frees} == {
        n for c in recorded.calls for n in c.gives()
    }


def test_source_is_plain_calls(traces: Path, tmp_path: Path) -> None:
    generate([traces], tmp_path / "b")
    text = (tmp_path / "b" / "benchmark.py").read_text()
    compile(text, "benchmark.py", "exec")
    assert "] = aten_addmm(t[" in text
    assert "def part_" in text
    assert "shardopt." not in text.replace("`shardopt", "")


def test_ops_without_schema_or_values_are_named(traces: Path, tmp_path: Path) -> None:
    def damage(node: dict) -> None:
        if node["name"] == "aten::sqrt":
            attribute(node, "op_schema")["value"] = "broken"
        if node["name"] == "aten::conv2d":
            attribute(node, "op_schema")["value"] = "corp::fused(Storage s) -> Tensor"

    path = edited(traces / "rank0.et.json", damage)
    generated = generate([path], tmp_path / "b")
    # a root for each of 7 parameters, and the convolution
    assert generated.ops_left_out == 8
    notes = "\n".join(generated.notes)
    assert "aten::sqrt: 7 left out: not the schema of an op" in notes
    assert "aten::conv2d: 1 left out" in notes
    with pytest.raises(InputError, match="8 ops would be left out"):
        generate([path], tmp_path / "c", strict=True)
    assert not (tmp_path / "c").exists()


def test_a_trace_that_begins_in_the_middle(traces: Path, tmp_path: Path) -> None:
    """Tensors that ops before the cut gave are made up front."""
    data = json.loads((traces / "rank0.et.json").read_text())
    complete = program(traces / "rank0.et.json")
    middle = sorted(node["id"] for node in data["nodes"])[len(data["nodes"]) // 2]
    data["nodes"] = [n for n in data["nodes"] if n["id"] > middle or n["id"] < 3]
    (tmp_path / "rank0.json").write_text(json.dumps(data))
    cut = program(tmp_path / "rank0.json")
    assert 0 < len(cut.calls) < len(complete.calls)
    check_runs(cut)


def outermost(trace: ExecutionTrace) -> list:
    """Ops that no other op called, found without what is under test."""
    by_id = {node.id: node for node in trace.nodes}
    nodes = []
    for node in trace.nodes:
        above, inside = by_id.get(node.parent), False
        while above is not None:
            inside = inside or bool(above.schema)
            above = by_id.get(above.parent)
        if node.schema and not inside:
            nodes.append(node)
    return nodes


@pytest.mark.parametrize(
    "name", ["dlrm_pytorch_et.tar.gz", "param_linear_et.json.gz", "param_resnet_et.json.gz"]
)
@needs_public_data
def test_public_traces_are_whole(name: str) -> None:
    """Every outermost op is a call, or is opened, left out or run by a backward call, and said."""
    loaded = load_traces([TRACES / name])
    for trace in loaded.executions:
        recorded = program_of(trace, loaded, Annotations())
        chosen = {op.node.id for op in choose(trace, is_composite)}
        native = [op.node for op in choose(trace, is_composite) if op.native]
        calls = {call.node: call for call in recorded.calls}
        for node in outermost(trace):
            if node.id not in chosen:
                assert is_composite(node.name) or any(_inside(trace, node, n) for n in native)
        assert len(recorded.calls) + len(recorded.left_out) == len(chosen)
        assert not recorded.left_out
        by_id = {node.id: node for node in trace.nodes}
        assert [*calls] == sorted(calls)
        for number, call in calls.items():
            if call.op.startswith("backward of"):
                continue
            node = by_id[number]
            assert call.op == node.name
            tensors = [a for a in node.outputs if "Tensor(" in a.type and "nullptr" not in a.type]
            shapes = [s for argument in tensors for s in _shapes(argument.shape)]
            if call.specs and not call.op.startswith("c10d::"):
                assert [s.shape for s in leaves(call.specs) if s] == shapes
            sent = [c for c in trace.nodes if c.parent == number and c.comm is not None]
            if sent and sent[0].comm is not None:
                assert call.bytes == sent[0].comm.size_bytes


def _inside(trace: ExecutionTrace, node, outer) -> bool:
    by_id = {n.id: n for n in trace.nodes}
    while node is not None and node.id != outer.id:
        node = by_id.get(node.parent)
    return node is not None


def _shapes(shape: tuple) -> list:
    if shape and isinstance(shape[0], tuple):
        return [s for inner in shape for s in _shapes(inner)]
    return [shape]


def test_a_kineto_trace_alone_is_refused(traces: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"rank0\.kineto\.json: .*execution trace"):
        generate([traces / "rank0.kineto.json"], tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("here", [False, True])
def test_a_trace_of_a_gpu_that_is_not_here_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: bool
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: here)
    synthetic.write(tmp_path, "kineto.json", synthetic.kineto())
    path = synthetic.write(tmp_path, "et.json", synthetic.execution())
    generated = generate([path.parent], tmp_path / "b")
    is_noted = any(
        "captured on Some GPU, and PyTorch sees no GPU here" in note for note in generated.notes
    )
    assert is_noted != here
