"""Batches of the lookups that are measured, and what is asked of FBGEMM for them."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import pytest

from predictor.cost.lookup.embedding import lookup_model
from predictor.cost.lookup.shard import LookupShard
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import CpuEmbedding
from predictor.model.distribution import Uniform, Zipf
from predictor.model.plan import ComputeKernel
from shardopt.calibrate import lookups as measure_embedding
from shardopt.calibrate.fitting import CalibratedProfile, Wiring
from shardopt.calibrate.gpu_lookups import cache_bins
from shardopt.calibrate.lookups import (
    DENSE,
    FORWARD,
    Launch,
    fit_cpu,
    lookup_points,
    make_tbe,
    measure_cached,
    measure_dense_lookup,
    measure_lookup,
    predict_lookups,
)
from shardopt.calibrate.points import QUICK, Point
from shardopt.calibrate.rows import PASSES, Origin
from shardopt.measure.sampling import FEWEST, WARM_UP, CpuTimer
from tests.shardopt.calibrate.synthetic import cpu_rows, row

torch = pytest.importorskip("torch")

TABLES = [
    {"rows": 5000, "dim": 4, "pooling": 2.5, "alpha": 0.0},
    {"rows": 20_000, "dim": 8, "pooling": 10.0, "alpha": 1.05},
]
CACHED = {
    **{"batch": 64, "tables": TABLES, "dtype": "fp16", "optimizer": "adam"},
    **{"kernel": "fused_uvm_caching", "cache_load_factor": 0.1},
}


class Tbe:
    """A TBE that remembers what it was asked, in order."""

    def __init__(self, *args: Any, **others: Any) -> None:
        self.args, self.others = args, others
        self.calls: list[tuple[str, int]] = []

    def split_embedding_weights(self) -> list[Any]:
        return []

    def prefetch(self, ids: Any, offsets: Any) -> None:
        self.calls.append(("prefetch", int(ids.sum())))

    def __call__(self, ids: Any, offsets: Any) -> Any:
        self.calls.append(("forward", int(ids.sum())))
        width = sum(table["dim"] for table in TABLES)
        output = torch.zeros(64, width, requires_grad=True)
        output.register_hook(lambda _: self.calls.append(("backward", int(ids.sum()))))
        return output


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Tbe]:
    tbes: list[Tbe] = []

    def make(*args: Any, **others: Any) -> Tbe:
        tbes.append(Tbe(*args, **others))
        return tbes[-1]

    monkeypatch.setattr(measure_embedding, "make_tbe", make)
    return tbes


def test_a_batch_has_the_ids_and_the_skew_that_it_should(made: list[Tbe]) -> None:
    launch = Launch({"batch": 4000, "tables": TABLES}, "cpu")
    arguments, counts = launch.draw()
    ids, offsets = arguments
    assert offsets[0] == 0
    assert offsets[-1] == len(ids)
    assert len(offsets) == 2 * 4000 + 1
    lengths = offsets.diff()
    assert set(lengths[:4000].tolist()) == {2, 3}
    assert set(lengths[4000:].tolist()) == {10}
    for table, (count, distinct) in zip(TABLES, counts, strict=True):
        bins = Zipf(table["alpha"]).bins(int(table["rows"]))
        assert distinct == pytest.approx(cache_bins(bins).unique(count), rel=0.03)
    assert ids.min() >= 0
    assert ids.max() < 20_000


def test_batches_differ_and_share_their_popular_rows(made: list[Tbe]) -> None:
    launch = Launch({"batch": 4000, "tables": TABLES[1:]}, "cpu")
    first, second = (launch.draw()[0][0] for _ in range(2))
    assert not torch.equal(first, second)
    assert first.mode().values == second.mode().values
    again = Launch({"batch": 4000, "tables": TABLES[1:]}, "cpu").draw()[0][0]
    assert torch.equal(first, again), "the same point is the same in every run"


def test_a_cache_is_warm_and_every_batch_is_new(made: list[Tbe]) -> None:
    rows = measure_cached(Point("lookup_cached", CACHED), CpuTimer(2**20), seconds=0.0)
    assert [row.part for row in rows] == ["prefetch", "forward", "backward"]
    tbe = made[0]
    assert tbe.others == {"cache_load_factor": 0.1}
    assert tbe.args[2:] == ("adam", "fp16", "fused_uvm_caching")
    steps = [tbe.calls[i : i + 3] for i in range(0, len(tbe.calls), 3)]
    for step in steps:
        assert [what for what, _ in step] == ["prefetch", "forward", "backward"]
        assert len({ids for _, ids in step}) == 1
    held = 0.1 * sum(table["rows"] for table in TABLES)
    distinct = sum(table[4] for table in rows[0].facts["tables"])
    warming = len(steps) - WARM_UP - FEWEST
    assert warming * distinct >= 4 * held
    batches = [step[0][1] for step in steps]
    assert len(set(batches)) == len(batches)


@pytest.mark.parametrize(
    ("device", "kernel", "where"),
    [
        ("cpu", "fused", "HOST"),
        ("cuda", "fused", "DEVICE"),
        ("cuda", "fused_uvm", "MANAGED"),
        ("cuda", "fused_uvm_caching", "MANAGED_CACHING"),
    ],
)
def test_a_kernel_is_where_its_tables_lie(
    monkeypatch: pytest.MonkeyPatch, device: str, kernel: str, where: str
) -> None:
    pytest.importorskip("fbgemm_gpu")
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as training

    monkeypatch.setattr(training, "SplitTableBatchedEmbeddingBagsCodegen", Tbe)
    tbe = make_tbe([(10, 4)], device, "exact_sgd", "fp16", kernel, cache_load_factor=0.3)
    ((rows, dim, location, compute),) = tbe.args[0]
    assert (rows, dim, location.name) == (10, 4, where)
    assert compute.name == ("CUDA" if device == "cuda" else "CPU")
    assert tbe.others["weights_precision"].value == "fp16"
    assert tbe.others["cache_load_factor"] == 0.3


def test_lookups_are_measured_both_ways(made: list[Tbe]) -> None:
    params = {"batch": 64, "tables": TABLES}
    rows = measure_lookup(Point("lookup", params), CpuTimer(2**20), seconds=0.0)
    assert [row.part for row in rows] == ["forward", "backward"]
    assert len({ids for _, ids in made[0].calls}) == 4, "a ring of four batches"


def test_a_gpu_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardopt.calibrate import host as measure_host
    from shardopt.calibrate import run

    about = types.SimpleNamespace(
        multi_processor_count=132, total_memory=80 * 2**30, L2_cache_size=50 * 2**20
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    assert measure_host._device() == {"sms": 132, "memory_gib": 80.0, "l2_mib": 50.0}
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    assert run.base_of_gpu(said.append) == "h200-sxm"
    assert not said
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA X9000")
    assert run.base_of_gpu(said.append) == "h100-sxm"
    assert "no profile ships for NVIDIA X9000" in said[0]


def test_a_dense_gradient_is_made_anew_in_every_sample() -> None:
    pytest.importorskip("fbgemm_gpu")
    point = Point("lookup_dense", {"batch": 16, "tables": TABLES})
    rows = measure_dense_lookup(point, CpuTimer(1024), 1e-3)
    assert [row.part for row in rows] == ["forward", "backward"]
    tbe = Launch({**point.params, "kernel": "dense"}, "cpu").tbe
    assert type(tbe).__name__ == "DenseTableBatchedEmbeddingBagsCodegen"
    assert tbe.weights.grad is None


HARDWARE = load_hardware("cpu-gloo")
LAW = HARDWARE.embedding
DENSE_LAW = LAW.model_copy(
    update={
        "backward_dense_table_us": 300.0,
        "backward_dense_ns_per_weight": 0.4,
        "backward_dense_ns_per_lookup": 6.0,
        "backward_dense_ns_per_lookup_dim": 0.05,
        "backward_dense_ns_per_row_dim": 0.8,
    }
)


@pytest.mark.parametrize("kernel", ["fused", "dense"])
def test_columns_are_the_law_that_predicts(kernel: str) -> None:
    shards = [
        LookupShard(
            Uniform().bins(rows),
            ids,
            512.0,
            rows,
            dim,
            kernel=ComputeKernel(kernel),
            optimizer="sgd",
        )
        for rows, dim, ids in ((1000, 16, 5e3), (100_000, 64, 2e4), (4_000_000, 128, 1e5))
    ]
    tables = [[s.rows, s.dim, s.bags, s.ids, s.distinct_rows] for s in shards]
    of = row(Point("lookup", {}), 1.0, "forward", tables=tables)
    model = lookup_model(HARDWARE.model_copy(update={"embedding": DENSE_LAW}))
    forward = model.forward_floor_ms() + sum(map(model.forward_ms, shards))
    backward = sum(map(model.backward_ms, shards))
    assert predict_lookups(LAW, [of], FORWARD)[0] == pytest.approx(forward)
    if kernel == "dense":
        assert predict_lookups(DENSE_LAW, [of], DENSE)[0] == pytest.approx(backward)


def test_one_wild_row_does_not_pull_the_law() -> None:
    rows = cpu_rows(HARDWARE, lookup_points(QUICK.lookups))
    wild = next(i for i, of in enumerate(rows) if of.part == "backward" and not of.point.test)
    rows[wild] = replace(rows[wild], median_us=3 * rows[wild].median_us)
    made = fit_cpu(CalibratedProfile(rows, Origin("m", "t"), Wiring(2), HARDWARE, HARDWARE))
    law = made.profile.embedding
    assert isinstance(law, CpuEmbedding)
    assert (law.page_kib, law.tlb_mib) == (LAW.page_kib, LAW.tlb_mib)
    for part in PASSES:
        assert abs(made.errors[f"lookup {part}"].errors).max() < 0.02
