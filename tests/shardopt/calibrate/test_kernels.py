"""Kernels that one rank times: each runs, on batches as its point says, and a failure is a row."""

from __future__ import annotations

import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from predictor.model.distribution import Zipf
from shardopt.calibrate import families, run
from shardopt.calibrate.gpu_lookups import cache_bins
from shardopt.calibrate.host import GPU_LOOPS
from shardopt.calibrate.points import TINY, CalibrationSettings, Point
from shardopt.calibrate.rows import PARTS, Measurement, row_of_samples
from shardopt.measure.sampling import CLEAN_ENOUGH, FEWEST, WARM_UP, CpuTimer, Samples, Timer

torch = pytest.importorskip("torch")
pytest.importorskip("fbgemm_gpu")
pytest.importorskip("scipy")

from shardopt.calibrate import kernels  # noqa: E402
from shardopt.calibrate.kernels import (  # noqa: E402
    HostTimer,
    Launch,
    make_tbe,
    measure_cached,
    measure_clock,
    measure_copy_h2d,
    measure_gemm,
    measure_host,
    measure_lookup,
    measure_streaming,
)

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

    monkeypatch.setattr(kernels, "make_tbe", make)
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
    monkeypatch.setattr(kernels, "SplitTableBatchedEmbeddingBagsCodegen", Tbe)
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
    about = types.SimpleNamespace(
        multi_processor_count=132, total_memory=80 * 2**30, L2_cache_size=50 * 2**20
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: about)
    assert kernels._device() == {"sms": 132, "memory_gib": 80.0, "l2_mib": 50.0}
    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    assert run.base_of_gpu(said.append) == "h200-sxm"
    assert not said
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA X9000")
    assert run.base_of_gpu(said.append) == "h100-sxm"
    assert "no profile ships for NVIDIA X9000" in said[0]


def test_a_dense_gradient_is_made_anew_in_every_sample() -> None:
    point = Point("lookup_dense", {"batch": 16, "tables": TABLES})
    rows = measure_lookup(point, CpuTimer(1024), 1e-3)
    assert [row.part for row in rows] == ["forward", "backward"]
    tbe = Launch({**point.params, "kernel": "dense"}, "cpu").tbe
    assert type(tbe).__name__ == "DenseTableBatchedEmbeddingBagsCodegen"
    assert tbe.weights.grad is None


def test_copies_and_reads_are_of_their_bytes() -> None:
    for measure, family in ((measure_copy_h2d, "copy_h2d"), (measure_streaming, "streaming")):
        (small,), (large,) = (
            measure(Point(family, {"bytes": size}), CpuTimer(2**16), 0.0) for size in (2**12, 2**25)
        )
        assert large.n >= CLEAN_ENOUGH
        assert large.p90_us >= large.median_us > small.median_us >= small.p10_us > 0


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16"])
def test_every_type_is_multiplied_and_none_changes_the_next(dtype: str) -> None:
    before = torch.get_float32_matmul_precision()
    params = {"m": 64, "n": 8, "k": 16, "dtype": dtype, "layout": "nt"}
    (found,) = measure_gemm(Point("gemm", params), CpuTimer(2**16), 0.0)
    assert found.n >= CLEAN_ENOUGH
    assert torch.get_float32_matmul_precision() == before == "highest"


@pytest.mark.parametrize("what", GPU_LOOPS)
def test_host_times_are_of_one_of_many(what: str) -> None:
    (row,) = measure_host(Point("host", {"what": what}), CpuTimer(2**16), 0.0)
    assert row.n >= CLEAN_ENOUGH
    assert 0 < row.p10_us <= row.median_us < 1e4
    assert row.facts == {}, "a CPU has nothing to say of itself"


def test_a_tiny_kernel_is_timed_between_events_and_by_itself() -> None:
    (row,) = measure_clock(Point("clock", {}), CpuTimer(2**16), 0.0)
    assert row.n >= CLEAN_ENOUGH
    assert 0 < row.facts["kernel_us"] < 1e4


def test_the_host_is_timed_while_no_device_works() -> None:
    waits: list[str] = []

    class Device(CpuTimer):
        def synchronize(self) -> None:
            waits.append("device")

    clock = HostTimer(Device(2**16))
    calls: list[str] = []
    clock.flush()
    clock.sample(lambda: calls.append("call"))
    assert waits == ["device"]
    assert calls == ["call"]


class Broken(CpuTimer):
    """A device that no longer answers."""

    def synchronize(self) -> None:
        raise RuntimeError("device-side assert")


def test_a_point_that_fails_is_a_row_with_its_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
        if point.params["bytes"] == 2:
            raise RuntimeError("row_counter_dev ... Float, but found Half\nand a stack")
        return [row_of_samples(point, Samples((1e-3, 1e-3)))]

    monkeypatch.setitem(kernels.MEASURES, "elementwise", refuse)
    timers = [CpuTimer(2**16), Broken(2**16)]
    monkeypatch.setattr(kernels, "timer_of", lambda _: timers.pop(0))
    points = [Point("elementwise", {"bytes": n}) for n in (1, 2, 3)]
    settings = CalibrationSettings("nccl", 1, TINY, tmp_path / "rows.csv")
    device = SimpleNamespace(type="cpu")
    rows = list(kernels.measure_alone(points, device, settings, lambda _: True))
    assert [row.point for row in rows] == points
    failure = "RuntimeError: row_counter_dev ... Float, but found Half"
    assert [row.failure for row in rows] == [None, failure, None]
    with pytest.raises(RuntimeError, match="device-side assert"):
        list(kernels.measure_alone(points, device, settings, lambda _: True))


SIZES = {"elements": 1024, "batch": 4, "rows": 8, "count": 3, "m": 4, "n": 5, "k": 6}


FAMILIES = ("product", "function", "attention", "concatenation", "lookup_unpooled", "layers")


def small(point: Point) -> Point:
    """The same op, of next to no size."""
    deep = {"k": 1} if point.params.get("layout") == "outer" else {}
    shape = {key: SIZES[key] for key in point.params if key in SIZES} | deep
    tables = [{**t, "rows": 50, "pooling": 2.0} for t in point.params.get("tables", [])]
    return Point(point.family, {**point.params, **shape, **({"tables": tables} if tables else {})})


def test_every_op_runs() -> None:
    timer = CpuTimer(2**12)
    unlike = {
        (p.family, *(p.params.get(key) for key in ("op", "layout", "form", "optimizer"))): small(p)
        for p in families.alone(TINY)
        if p.params.get("depth", 0) <= 2
    }
    assert {point.family for point in unlike.values()} >= set(FAMILIES)
    for point in unlike.values():
        rows = kernels.MEASURES[point.family](point, timer, 0.0)
        assert tuple(row.part for row in rows) == PARTS.get(point.family, ("",))
        assert all(row.median_us > 0 for row in rows)
