"""Ops, bytes and collectives of a feature processor on two gloo ranks, as they are predicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed import fp_embeddingbag
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from predictor.cost.ops.position_weights import (
    OPS,
    PREPARE_BYTES,
    PREPARE_OPS,
    RANGE_BYTES,
    READ_BACK_BYTES,
    SPREAD_BYTES,
    SPREAD_OPS,
    WEIGH_BYTES,
)
from predictor.model.dlrm_program import dense_program
from predictor.model.plan import ShardingPlan, ShardingType, TablePlan
from predictor.model.workload import DenseArch, Feature, Table, Workload
from shardopt.torchrec.capture.recorder import OpRecorder, RecordedCall
from shardopt.training.batch import batch_ring
from shardopt.training.loop import Training
from tests.builders import a_topology, plan_of, sharded, table_wise
from tests.distributed.ranks import on_ranks

pytestmark = pytest.mark.distributed

POSITIONS, BATCH, DIM = 64, 128, 16
TABLES = tuple(
    Table(
        f"t{at}",
        4000,
        DIM,
        (Feature(f"f{at}", 30.0, position_weights=POSITIONS),),
        "fp",
        weighted=True,
    )
    for at in range(4)
)
WORKLOAD = Workload("weighed", BATCH, TABLES, DenseArch(13, (16,), (16, 1), "concat"))


def plans(kind: str) -> tuple[TablePlan, ...]:
    table_wise_tables = tuple(table_wise(table, at % 2) for at, table in enumerate(TABLES))
    rows = sharded(WORKLOAD, a_topology(2), ShardingType.ROW_WISE)
    return {"whole": table_wise_tables, "rows": rows, "both": (*table_wise_tables[:2], *rows[2:])}[
        kind
    ]


LARGE = 2000
"""Elements from which an operand is one of ids or outputs, not of parameters or splits."""


class Ops(OpRecorder):
    """Ops, and the part of the step that each runs in."""

    def __init__(self) -> None:
        super().__init__(custom=True, frees=False)
        self.part = ""
        self.path_now = lambda: self.part

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        before, self.part = self.part, part
        yield
        self.part = before


def by_part(calls: list[RecordedCall]) -> dict[str, Any]:
    """Number of the ops that are no views, and the bytes of their large operands."""
    parts: dict[str, Any] = {}
    for call, name in ((c.call, c.op.split("::")[-1]) for c in calls):
        inputs, out = call.inputs, call.outputs
        fresh = {o.storage for o in out} - {o.storage for o in inputs}
        if call.path and (fresh or name.endswith("_")) and not name.startswith("empty"):
            written = inputs[:1] if name.endswith("_") else out
            read = inputs[1:] if name == "copy_" else () if name == "zeros_like" else inputs
            part = parts.setdefault(call.path, {"bytes": 0, "ops": []})
            large = [o for o in (*read, *written) if o.elements >= LARGE]
            part["bytes"] += sum(o.elements * o.item_bytes for o in large)
            part["ops"].append(name)
    return parts


def moved(calls: list[RecordedCall]) -> list[tuple[str, str, int]]:
    """Collectives, data types and elements."""
    moves = []
    for call, name in ((c.call, c.op.removeprefix("c10d::")) for c in calls if "c10d" in c.op):
        sent = call.inputs[name == "alltoall_base_"]
        moves.append((name, sent.data_type, sent.elements))
    return moves


def short(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """With lengths of 4 bytes, as TorchRec's own data sets have."""
    return KeyedJaggedTensor(ids.keys(), ids.values(), lengths=ids.lengths().int())


def watch(ops: Ops, ids: dict[str, list[int]]) -> None:
    """Note what TorchRec's functions for feature processors run."""
    sharded: Any = ShardedFeatureProcessedEmbeddingBagCollection
    prepare, weigh = (
        fp_embeddingbag.modify_input_for_feature_processor,
        sharded.apply_feature_processors_to_kjt_list,
    )
    spread = sharded.add_fp_params_grad_sync_callback

    def prepared(features: Any, *args: Any, **more: Any) -> Any:
        ids["local"] = [features.values().numel()]
        with ops.during("prepare"):
            return prepare(features, *args, **more)

    def weighed(self: Any, given: Any) -> Any:
        ids["looked up"] = [features.values().numel() for features in given]
        ids["features"] = [len(features.keys()) for features in given]
        with ops.during("weigh"):
            return weigh(self, given)

    def spreading(self: Any, awaitable: Any) -> Any:
        with ops.during("spread"):
            outputs = spread(self, awaitable)
        (add,) = outputs.callbacks[-1:]

        def added(kt: Any) -> Any:
            with ops.during("spread"):
                return add(kt)

        outputs.callbacks[-1] = added
        return outputs

    fp_embeddingbag.modify_input_for_feature_processor = prepared
    sharded.apply_feature_processors_to_kjt_list = weighed
    sharded.add_fp_params_grad_sync_callback = spreading


def step_under(plan: ShardingPlan) -> dict[str, Any]:
    """The ops of the processor in a step, before ids are sent, on what is looked up and backward:
    their number and bytes; the ids of each exchange; and what collectives moved."""
    ring = [
        replace(batch, sparse={"fp": short(batch.sparse["fp"])})
        for batch in batch_ring(WORKLOAD, rank=dist.get_rank(), size=4)
    ]
    training = Training(WORKLOAD, plan, torch.device("cpu"), ring)
    ops, ids = Ops(), dict[str, list[int]]()
    watch(ops, ids)
    training.step()
    backward = torch.Tensor.backward

    def back(self: torch.Tensor, *args: Any, **more: Any) -> None:
        with ops.during("backward"):
            backward(self, *args, **more)

    with ops, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "backward", back)
        training.step()
    calls = ops.recording.calls
    return {"parts": by_part(calls), "ids": ids, "moved": moved(calls)}


@pytest.mark.parametrize("kind", ["whole", "rows", "both"])
def test_as_many_ops_and_bytes_as_predicted(kind: str) -> None:
    plan = plan_of(WORKLOAD, a_topology(2), plans(kind))
    gradients = dense_program(WORKLOAD).gradient_bytes
    for found in on_ranks(step_under, plan):
        check(found["parts"], found["ids"], travels=kind != "whole")
        moved = found["moved"]
        assert sum(count for name, _, count in moved if name == "allreduce_") == gradients / 4
        of_ids = [(i, m) for i, m in enumerate(moved) if m[1] == "int64" and m[2] > BATCH]
        weights = [("alltoall_base_", "fp32", ids[2]) for _, ids in of_ids]
        after = [moved[i + 1] for i, _ in of_ids]
        assert (after == weights) is (kind != "whole")


def check(parts: dict[str, Any], ids: dict[str, Any], *, travels: bool) -> None:
    looked_up, features = sum(ids["looked up"]), sum(ids["features"])
    exchanges = len(ids["looked up"])
    outputs = BATCH * DIM * len(TABLES)
    if travels:
        (local,) = ids["local"]
        assert len(parts["prepare"]["ops"]) == PREPARE_OPS
        assert parts["prepare"]["bytes"] == PREPARE_BYTES * local
    else:
        assert "prepare" not in parts
    weigh = Counter(parts["weigh"]["ops"])
    offsets = weigh.pop("asynchronous_complete_cumsum")  # the lookup needs them anyway
    a_rank, a_feature = OPS[False]
    assert (offsets, weigh.total()) == (exchanges, a_rank * exchanges + a_feature * features)
    each = (READ_BACK_BYTES if travels else RANGE_BYTES) + WEIGH_BYTES
    assert parts["weigh"]["bytes"] == each * looked_up
    assert len(parts["spread"]["ops"]) == SPREAD_OPS[False]
    assert parts["spread"]["bytes"] == SPREAD_BYTES[False] * outputs
    backward = Counter(parts["backward"]["ops"])
    a_rank, a_feature = OPS[True]
    assert backward["mul_"] == a_rank * exchanges
    for name in ("new_zeros", "scatter_add", "add"):
        assert 3 * backward[name] == a_feature * features
