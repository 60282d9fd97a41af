"""Kernels, copies and host costs that a GPU's design adds run wherever there is PyTorch."""

from __future__ import annotations

import pytest

from shardopt.calibrate.design.points import Point
from shardopt.calibrate.kernels.dense import measure_copy_h2d, measure_gemm, measure_streaming
from shardopt.calibrate.kernels.host import HostTimer, measure_host
from shardopt.calibrate.rows import Measurement
from shardopt.measure.sampling import CLEAN_ENOUGH, CpuTimer

torch = pytest.importorskip("torch")


def timer() -> CpuTimer:
    return CpuTimer(2**16)


def checked(rows: list[Measurement]) -> Measurement:
    (row,) = rows
    assert row.n >= CLEAN_ENOUGH
    assert 0 < row.p10_us <= row.median_us <= row.p90_us
    return row


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16"])
def test_every_type_is_multiplied_and_none_changes_the_next(dtype: str) -> None:
    before = torch.get_float32_matmul_precision()
    params = {"m": 64, "n": 8, "k": 16, "dtype": dtype, "layout": "nt"}
    checked(measure_gemm(Point("gemm", params), timer(), 0.0))
    assert torch.get_float32_matmul_precision() == before == "highest"


def test_copies_and_reads_are_of_their_bytes() -> None:
    for measure, family in ((measure_copy_h2d, "copy_h2d"), (measure_streaming, "streaming")):
        small = checked(measure(Point(family, {"bytes": 2**12}), timer(), 0.0))
        large = checked(measure(Point(family, {"bytes": 2**25}), timer(), 0.0))
        assert large.median_us > small.median_us


@pytest.mark.parametrize("what", ["op", "op_on_host", "round_trip", "sync"])
def test_host_times_are_of_one_of_many(what: str) -> None:
    row = checked(measure_host(Point("host", {"what": what}), timer(), 0.0))
    assert row.median_us < 1e4
    assert row.facts == {}, "a CPU has nothing to say of itself"


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
