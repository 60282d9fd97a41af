"""Execution traces of both layouts."""

from pathlib import Path

import pytest

from predictor.trace.execution import ExecutionTrace, Tensor
from predictor.trace.read import load_traces
from tests.predictor.trace.synthetic import execution, write


def read(folder: Path, document: object, name: str = "dlrm_et_1.json") -> ExecutionTrace:
    (execution_trace,) = load_traces([write(folder, name, document)]).executions
    return execution_trace


@pytest.mark.parametrize("nested", [False, True])
def test_both_layouts_say_the_same(tmp_path: Path, nested: bool) -> None:
    trace = read(tmp_path, execution(1, nested=nested))
    assert trace.rank == 1
    assert [node.name for node in trace.nodes] == [
        "aten::mm",
        "c10d::allreduce_",
        "record_param_comms",
        "nccl:all_reduce",
        "aten::add",
    ]
    product = trace.nodes[0]
    assert product.inputs[0].value == Tensor(5, 6, 0, 100, 4, "cuda:1")
    assert (product.inputs[0].shape, product.inputs[0].type) == ((10, 10), "Tensor(float)")
    assert (product.record, product.parent, product.thread) == (2, 2, 1)
    comm = trace.nodes[2].comm
    assert comm is not None
    assert (comm.op, comm.size_bytes, comm.output_bytes) == ("all_reduce", 4000, 4000)
    assert trace.op_counts() == {"aten::mm": 1, "c10d::allreduce_": 1, "aten::add": 1}
    # mm and add take two matrices of 400 bytes each; c10d::allreduce_ calls another node
    assert trace.input_bytes() == 1600


def test_attributes_count_more_than_inputs(tmp_path: Path) -> None:
    document = execution(nested=True)
    attributes = {
        "collective_name": "all_to_allv",
        "dtype": "Float",
        "in_msg_nelems": 10,
        "out_msg_nelems": 20,
        "in_split_size": "[4, 6]",
        "pg_name": "7",
        "pg_size": 2,
        "global_rank_start": 4,
        "global_rank_stride": 1,
    }
    for node in document["nodes"]:
        if node["name"] == "record_param_comms":
            node["attrs"] += [{"name": k, "type": "x", "value": v} for k, v in attributes.items()]
    (node,) = read(tmp_path, document).collectives()
    comm = node.comm
    assert comm is not None
    assert (comm.op, comm.size_bytes, comm.output_bytes) == ("all_to_all", 40, 80)
    assert (comm.send_bytes, comm.group, comm.group_name) == ((16, 24), (4, 5), "7")


def test_unreadable_nodes_are_counted(tmp_path: Path) -> None:
    document = execution()
    document["nodes"] += [7, {"id": 1}, {**document["nodes"][0], "inputs": [1]}]
    trace = read(tmp_path, document)
    assert any("3 of 10 nodes could not be read" in note for note in trace.notes)


def test_alone_they_hold_no_times(tmp_path: Path) -> None:
    path = write(tmp_path, "et_1.json", execution(1))
    traces = load_traces([path])
    assert not traces.traces
    assert any("no times for rank 1" in note for note in traces.notes)
