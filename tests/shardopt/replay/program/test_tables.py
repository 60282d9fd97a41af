"""With a table summary lookups read tables of the true rows and widths."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
import torch

from predictor.errors import InputError
from predictor.model.distribution import Uniform, Zipf
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.workload import DenseArch, Feature, Table, Workload
from shardopt.replay.check import check_tables
from shardopt.replay.generate import generate
from shardopt.replay.program.tables import MatchedTables, TableSummary, UnmatchedError, load_tables
from shardopt.replay.runtime.tensors import draw_by, make_all
from tests.shardopt.replay.captured import capture

ROWS, WIDTHS = (70, 200, 30), (8, 4, 16)
POOLING = (1.0, 6.0, 2.0, 3.0)
SAMPLES = 8
MODEL = """
schema: 1
name: m
batch_size: 8
tables:
  - {name: a, num_embeddings: 70, embedding_dim: 8, features: [{name: f0, pooling_factor: 1.0}]}
  - name: b
    num_embeddings: 200
    embedding_dim: 4
    features:
      - {name: f1, pooling_factor: 6.0, index_distribution: {zipf: {alpha: 1.2}}}
      - {name: f2, pooling_factor: 2.0}
  - {name: c, num_embeddings: 30, embedding_dim: 16, features: [{name: f3, pooling_factor: 3.0}]}
dense: {in_features: 4, bottom_mlp: [8], interaction: concat, top_mlp: [1]}
"""


def workload(*tables: Table, pipeline: str = "base") -> Workload:
    dense = DenseArch(4, (8,), (1,), "concat")
    return Workload("m", SAMPLES, tables, dense, train_pipeline=pipeline)


def table(name: str, rows: int, width: int, **changes: Any) -> Table:
    return replace(Table(name, rows, width, (Feature(name, 2.0),)), **changes)


def planned(kind: ShardingType, *shards: tuple[int, tuple[int, int], tuple[int, int]]) -> TablePlan:
    placed = tuple(Shard(rank, offset, size) for rank, offset, size in shards)
    return TablePlan(kind, ComputeKernel.FUSED, placed)


def test_tables_of_ranks_follow_the_plan() -> None:
    hot = Feature("h", 10.0, distribution=Zipf(1.0), id_order="frequency")
    load = workload(
        table("a", 40, 8), table("b", 20, 16), table("h", 100, 8, features=(hot,)), table("c", 9, 4)
    )
    plan = ShardingPlan(
        {
            "a": planned(ShardingType.TABLE_WISE, (1, (0, 0), (40, 8))),
            "b": planned(ShardingType.COLUMN_WISE, (0, (0, 0), (20, 8)), (1, (0, 8), (20, 8))),
            "h": planned(ShardingType.ROW_WISE, (0, (0, 0), (50, 8)), (1, (50, 0), (50, 8))),
            "c": planned(ShardingType.TABLE_WISE, (1, (0, 0), (9, 4))),
        },
        2,
        2,
    )
    summary = TableSummary(load, plan, "m")
    sizes = [
        [[*zip(lookup.rows, lookup.widths, strict=True)] for lookup in summary.of_rank(rank)]
        for rank in (0, 1)
    ]
    assert sizes[0] == [[(20, 8)], [(50, 8)]]
    assert sizes[1] == [[(40, 8), (9, 4)], [(20, 8)], [(50, 8)]]
    first, second = (summary.of_rank(rank)[-1].shares[0] for rank in (0, 1))
    assert first + second == pytest.approx(10.0, rel=1e-5)
    assert first > 4 * second
    lookups = TableSummary(load, None, "m").of_rank(5)
    assert [lookup.rows for lookup in lookups] == [[40, 20, 100, 9]]
    with pytest.raises(InputError, match=r"the plan is for 2 ranks, and the trace has rank 2"):
        summary.of_rank(2)


def test_tables_of_other_kinds_are_lookups_of_their_own() -> None:
    load = workload(
        table("a", 40, 8),
        table("b", 20, 8, optimizer="adam"),
        table("c", 30, 8, module="other"),
        table("d", 10, 8, pooling="mean"),
        table("e", 50, 8),
    )
    lookups = TableSummary(load, None, "m").of_rank(0)
    assert [lookup.rows for lookup in lookups] == [[40, 50], [20], [30], [10]]


def lookups() -> tuple[Any, Callable[[], None]]:
    """FBGEMM's own module, of three tables of which one has two features."""
    pytest.importorskip("fbgemm_gpu")
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        EmbeddingLocation,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    specs = [
        (rows, width, EmbeddingLocation.HOST, ComputeDevice.CPU)
        for rows, width in zip(ROWS, WIDTHS, strict=True)
    ]
    module = SplitTableBatchedEmbeddingBagsCodegen(
        specs, feature_table_map=[0, 1, 1, 2], optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD
    )
    lengths = torch.tensor([int(p) for p in POOLING]).repeat_interleave(SAMPLES)
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
    indices = torch.arange(int(offsets[-1])) % min(ROWS)

    def step() -> None:
        module(indices, offsets).sum().backward()

    return module, step


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    place = tmp_path_factory.mktemp("lookups")
    module, step = lookups()
    (place / "model.yaml").write_text(MODEL)
    capture(step, place / "traces")
    return module, place


def test_arguments_are_those_of_the_recorded_module(recorded: tuple[Any, Path]) -> None:
    module, place = recorded
    summary = load_tables(place / "model.yaml", None)
    program = generate([place / "traces"], place / "b", tables=summary).programs[0]
    listed = [fill["values"] for fill in program.fills.values() if fill["kind"] == "list"]
    for name in ("D_offsets", "hash_size_cumsum", "weights_offsets", "momentum1_offsets"):
        assert getattr(module, name).tolist() in listed, name
    data = json.loads((place / "b" / "rank0.json").read_text())
    values = make_all(data["made"], data["tensors"], torch.device("cpu"), "uniform", 0)
    kinds = {fill["kind"]: number for number, fill in program.fills.items()}
    offsets = values[kinds["table_offsets"]]
    lengths = offsets.diff().reshape(4, SAMPLES)
    assert lengths.sum(1).tolist() == [SAMPLES * pooling for pooling in POOLING]
    ids = values[kinds["table_ids"]].split(lengths.sum(1).tolist())
    assert offsets[-1] == sum(map(len, ids))
    for own, rows in zip(ids, (70, 200, 200, 30), strict=True):
        assert 0 <= own.min() <= own.max() < rows
    reading = [call for call in program.calls if "codegen" in call.op]
    assert len(reading) == 2
    for call in reading:
        assert {kinds["table_offsets"], kinds["table_ids"]} <= set(call.reads())
    text = (place / "b" / "rank0.json").read_text()
    assert "f0" not in text


def test_without_a_summary_tables_are_alike(recorded: tuple[Any, Path]) -> None:
    _, place = recorded
    program = generate([place / "traces"], place / "alike").programs[0]
    assert "table_offsets" not in {fill["kind"] for fill in program.fills.values()}
    ids = next(fill for fill in program.fills.values() if fill["kind"] == "table_ids")
    assert set(ids) == {"kind", "rows"}


def test_other_tables_are_refused(recorded: tuple[Any, Path]) -> None:
    _, place = recorded
    for old, new, message in (
        ("num_embeddings: 30,", "num_embeddings: 31,", "weights: 1,856"),
        ("embedding_dim: 4\n", "embedding_dim: 8\n", "sum of their widths: 40"),
        ("      - {name: f2, pooling_factor: 2.0}\n", "", "features: 3"),
    ):
        text = MODEL.replace(old, new)
        (place / "other.yaml").write_text(text)
        with pytest.raises(InputError, match=r"rank 0: fbgemm::.*the trace has features: 4") as e:
            generate(
                [place / "traces"], place / "no", tables=load_tables(place / "other.yaml", None)
            )
        assert message in str(e.value).partition("gives")[2]
        assert "or no model file" in str(e.value)
    assert not (place / "no").exists()


def test_each_group_of_tables_is_one_lookups() -> None:
    load = workload(table("a", 40, 8), table("b", 40, 8, module="other"))
    matched = MatchedTables(TableSummary(load, None, "m"), 0)
    arguments = {"D_offsets": (2,), "total_D": 8, "dev_weights": (320,)}
    first, second = matched.of("op", 1, arguments), matched.of("op", 2, arguments)
    assert first is matched.groups[0]
    assert second is matched.groups[1]
    assert matched.of("op", 1, {}) is first
    with pytest.raises(UnmatchedError, match="no more lookups"):
        matched.of("op", 3, arguments)


def test_ids_follow_their_laws() -> None:
    generator = torch.Generator().manual_seed(0)
    load = workload(
        table("z", 1000, 8, features=(Feature("z", 2.0, distribution=Zipf(1.1)),)),
        table("h", 1000, 8, features=(Feature("h", 2.0, 1.0, Zipf(1.1), "frequency"),)),
        table("u", 1000, 8, features=(Feature("u", 2.0, distribution=Uniform()),)),
    )
    scattered, hot, even = TableSummary(load, None, "m").of_rank(0)[0].skews
    assert even == "uniform"
    chances = torch.arange(1, 1001, dtype=torch.float64) ** -1.1
    top = float(chances[0] / chances.sum())
    for skew in (scattered, hot):
        ids = draw_by(skew, 20_000, 1000, generator)
        counts = ids.bincount(minlength=1000)
        assert int(counts.max()) / 20_000 == pytest.approx(top, abs=0.015)
        assert int(counts.argmax() == 0) == (skew is hot)
        assert 0 <= int(ids.min()) <= int(ids.max()) < 1000
    assert not len(draw_by(hot, 0, 0, generator))


def test_a_plan_needs_tables() -> None:
    with pytest.raises(InputError, match="a plan says which tables"):
        check_tables(None, Path("plan.json"))
    with pytest.raises(InputError, match="not of joined ones"):
        check_tables(Path("m.yaml"), None, join=True)
