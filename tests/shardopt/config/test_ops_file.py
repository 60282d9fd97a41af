"""The ops file: read as written, and refused by file and key where it is damaged or of another
model."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from predictor.cost.dense import DenseWork
from predictor.cost.fixed_costs import FixedCosts
from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.model.captured import CapturedDense, CapturedProgram
from predictor.model.op_calls import Gradient, Lookup, LookupBackward, OpCall
from predictor.model.topology import Topology
from predictor.model.workload import QComm, Workload
from shardopt.config import load_model, read_model
from shardopt.config.ops_file import ops_text, read_ops, read_ops_content
from shardopt.config.write import with_digest, write_model

OPS: dict[str, Any] = {
    "schema": "shardopt.ops/1",
    "module": "Ranker",
    "batch_size": 512,
    "scales": True,
    "loss": "what forward gives back",
    "in_features": 0,
    "features": {"ebc": ["f"]},
    "ids": {"n0": [["ebc", "f"]]},
    "optimizer_name": "sgd",
    "state_bytes": 0,
    "storages": [256, "256*B", "4*B", "256*B", "8*n0 + 8", 256],
    "resident": ["0 fp32[1, 64]"],
    "forward": [
        {"lookup": "ebc", "out": ["1 fp32[B, 64]"]},
        {
            "op": "mm",
            "in": ["1 fp32[B, 64]", "0 fp32[64, 1] strides[1, 64]"],
            "out": ["2 fp32[B, 1]"],
        },
        {"op": "arange", "out": ["4 int64[n0] offset 1"], "frees": [4]},
    ],
    "backward": [
        {"op": "mm", "in": ["2 fp32[B, 1]", "0 fp32[1, 64]"], "out": ["3 fp32[B, 64]"]},
        {"lookup_backward": "ebc", "in": ["3 fp32[B, 64]"]},
        {
            "op": "mm",
            "in": ["2 fp32[1, B]", "1 fp32[B, 64]"],
            "out": ["5 fp32[1, 64]"],
            "frees": [1, 2],
        },
        {"gradient": 64, "item_bytes": 4},
    ],
    "optimizer": [
        {"op": "add_", "in": ["0 fp32[1, 64]", "5 fp32[1, 64]"], "mutates": True},
    ],
}
MODEL = """schema: 1
batch_size: 512
tables:
  - name: t
    num_embeddings: 1000
    embedding_dim: 64
    features: [{name: f, pooling_factor: 2, index_distribution: uniform}]
dense: {ops: m.ops.json}
"""


def program(raw: Any) -> CapturedProgram:
    return read_ops_content(json.dumps(raw).encode(), "m.ops.json")


def changed(**keys: Any) -> dict[str, Any]:
    return {**copy.deepcopy(OPS), **keys}


def model(folder: Path, raw: Any = OPS, text: str = MODEL) -> Path:
    (folder / "m.ops.json").write_text(raw if isinstance(raw, str) else json.dumps(raw))
    path = folder / "model.yaml"
    path.write_text(text)
    return path


def test_workloads_share_a_price_only_where_the_captured_part_costs_the_same(
    tmp_path: Path,
) -> None:
    workload = load_model(model(tmp_path), batch_size=1000)
    assert isinstance(workload.dense, CapturedDense)
    ranks, h100 = Topology.uniform(2, hbm_bytes=0, ddr_bytes=0), load_hardware("h100-sxm")

    def priced(load: Workload, hardware: HardwareProfile = h100) -> DenseWork:
        return FixedCosts(load, ranks, hardware).dense

    price = priced(workload)
    assert priced(replace(workload, qcomm=QComm("bf16", "bf16"))) is price
    compiled = replace(workload, dense=replace(workload.dense, compiled=True))
    (first, *_), fewer = workload.tables, load_model(model(tmp_path), batch_size=500)
    (feature, *_) = first.features
    longer = replace(feature, pooling_factor=9 * feature.pooling_factor)
    more_ids = (replace(first, features=(longer, *first.features[1:])), *workload.tables[1:])
    for another_price in (
        priced(compiled),
        priced(fewer),
        priced(replace(workload, tables=more_ids)),
        priced(workload, load_hardware("cpu-gloo")),
    ):
        assert another_price is not price


def test_sizes_grow_with_the_batch_and_the_ids(tmp_path: Path) -> None:
    workload = load_model(model(tmp_path), batch_size=1000)
    assert isinstance(workload.dense, CapturedDense)
    ops = workload.dense.program(workload)
    lookup, product, arange = ops.forward
    assert isinstance(lookup, Lookup)
    assert (lookup.module, lookup.outputs[0].shape) == ("ebc", (1000, 64))
    assert isinstance(product, OpCall)
    assert product.inputs[1].strides == (1, 64)
    assert isinstance(arange, OpCall)
    assert (arange.outputs[0].shape, arange.outputs[0].storage_bytes) == ((2000,), 16008)
    assert arange.freed == (4,)
    assert [type(event) for event in ops.backward] == [OpCall, LookupBackward, OpCall, Gradient]
    assert ops.gradient_bytes == 256


def test_what_is_written_is_read_and_counts_for_the_digest(tmp_path: Path) -> None:
    read = load_model(model(tmp_path))
    again = tmp_path / "again"
    again.mkdir()
    write_model(again / "model.yaml", read)
    assert load_model(again / "model.yaml") == with_digest(read)
    captured, content = read_ops(again / "m.ops.json")
    assert content.decode() == ops_text(captured)
    larger_state = changed(state_bytes=4)
    assert load_model(model(tmp_path, larger_state)).sha256 != read.sha256


def test_ids_that_cannot_be_scaled_are_noted(tmp_path: Path) -> None:
    sequences = MODEL.replace("    features", "    pooling: none\n    features")
    for tied, text, expected in (
        ({"f": 100}, sequences, 1),
        ({"f": 2}, sequences, 0),
        ({}, sequences, 0),
        ({"f": 100}, MODEL, 0),  # what is pooled is as large whatever it pools
    ):
        _, notes, _ = read_model(model(tmp_path, changed(tied_ids=tied), text))
        assert len(notes) == expected
    path = model(tmp_path, changed(tied_ids={"f": 100}), sequences)
    (note,) = read_model(path)[1]
    assert "feature 'f' has 2 ids" in note
    assert "100" in note


def test_ops_that_are_of_one_batch_are_refused_at_another(tmp_path: Path) -> None:
    path = model(tmp_path, changed(scales=False))
    assert load_model(path).batch_size == 512
    with pytest.raises(InputError, match=r"m.ops.json.*512.*64"):
        load_model(path, batch_size=64)


@pytest.mark.parametrize(
    ("storages", "batch", "message"),
    [
        ([256, "255*B", "4*B", "256*B", "8*n0 + 8", 256], 512, "storage 1 has 130560"),
        ([256, "256*B", "B*B*B*B", "256*B", "8*n0 + 8", 256], 10**6, r"the size 'B\*B\*B\*B' is"),
        ([256, "256*B", "4*B - 4096", "256*B", "8*n0 + 8", 256], 512, "is -2048"),
    ],
)
def test_sizes_that_cannot_be_are_refused_at_their_batch(
    tmp_path: Path, storages: list[Any], batch: int, message: str
) -> None:
    path = model(tmp_path, changed(storages=storages))
    with pytest.raises(InputError, match=f"m.ops.json: .*{message}"):
        load_model(path, batch_size=batch)


def test_the_file_must_be_there_and_a_file(tmp_path: Path) -> None:
    path = model(tmp_path, text=MODEL.replace("m.ops.json", "n.ops.json"))
    with pytest.raises(InputError, match=r"model.yaml:8: dense.ops: .*n.ops.json"):
        load_model(path)
    path = model(tmp_path, text=MODEL.replace("m.ops.json", "/dev/zero"))
    with pytest.raises(InputError, match="FIFO or a device"):
        load_model(path)


def test_another_optimizer_asks_for_another_capture(tmp_path: Path) -> None:
    text = MODEL.replace("m.ops.json", "m.ops.json, optimizer: adam")
    with pytest.raises(InputError, match=r"dense.optimizer: got 'adam'.*sgd"):
        load_model(model(tmp_path, text=text))


def test_linear_layers_alone_are_no_longer_read(tmp_path: Path) -> None:
    text = MODEL.replace("ops: m.ops.json", "linears: [[64, 1]]")
    with pytest.raises(InputError, match=r":8: dense.linears: .*run to_yaml"):
        load_model(model(tmp_path, text=text))
