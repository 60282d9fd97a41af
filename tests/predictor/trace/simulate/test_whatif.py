"""What a traced job would take elsewhere: hand-made traces, and a public one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.trace.events import CollectiveCall, HostEvent, RankTrace
from predictor.trace.read import read_traces
from predictor.trace.simulate.whatif import gemm_calls, what_if
from tests.predictor.trace.handmade import PAGEABLE, Recorder
from tests.public_data import TRACES, needs_public_data

V100 = "Tesla V100-SXM2-32GB"


def bound_by_its_device(device: str = V100, collective: CollectiveCall | None = None) -> RankTrace:
    """Steps of 1 s whose host waits for a kernel of 900 ms, or for a collective."""
    record = Recorder()
    for number in range(2):
        at = 1e6 * number
        record.step(at, at + 1e6)
        record.op("aten::mm", at + 10, at + 40)
        name = "volta_sgemm" if collective is None else "ncclKernel_AllReduce"
        record.launch((at + 20, at + 30), (at + 40, at + 9e5), name=name, collective=collective)
        record.op("aten::item", at + 50, at + 9.5e5)
        record.launch(
            (at + 60, at + 9e5 + 12),
            (at + 9e5 + 1, at + 9e5 + 2),
            name=PAGEABLE,
            runtime="cudaMemcpyAsync",
        )
    return record.trace(world_size=8, device=device)


def with_shapes(trace: RankTrace, *shapes: tuple[int, ...]) -> RankTrace:
    def shaped(event: HostEvent) -> HostEvent:
        if event.name != "aten::mm":
            return event
        return replace(event, shapes=shapes, dtypes=("float",) * len(shapes))

    return replace(trace, host=tuple(shaped(e) for e in trace.host))


def step_ms(trace: RankTrace, **changes: object) -> float:
    return what_if([trace], **changes).steps[0].predicted_ms  # type: ignore[arg-type]


def test_nothing_changed_is_the_replay() -> None:
    trace = bound_by_its_device()
    found = what_if([trace])
    assert found.steps[0].predicted_ms == pytest.approx(1000, rel=0.001)
    assert "100 % as traced" in found.notes[-1]


def test_a_kernel_without_shapes_scales_with_its_resource() -> None:
    old, new = load_hardware("v100-32gb"), load_hardware("h100-sxm")
    ratio = old.gemm.tflops["fp32"] / new.gemm.tflops["fp32"]
    found = what_if([bound_by_its_device()], hardware=new)
    assert found.steps[0].predicted_ms == pytest.approx(100 + 900 * ratio, rel=0.01)
    assert "by the ratio of a resource" in found.notes[-1]


def test_a_kernel_with_shapes_scales_with_its_model() -> None:
    trace = with_shapes(bound_by_its_device(), (8192, 8192), (8192, 8192))
    (call, _) = gemm_calls(trace)
    assert (call.count, call.m, call.n, call.k, call.data_type) == (1, 8192, 8192, 8192, "fp32")
    old, new = load_hardware("v100-32gb"), load_hardware("h100-sxm")
    ratio = call.predicted_ms(new) / call.predicted_ms(old)
    found = what_if([trace], hardware=new)
    assert found.steps[0].predicted_ms == pytest.approx(100 + 900 * ratio, rel=0.01)
    assert "by a model of both devices" in found.notes[-1]


def test_batch_scales_the_work_and_not_the_host() -> None:
    assert step_ms(bound_by_its_device(), batch_scale=2) == pytest.approx(1900, rel=0.01)
    assert step_ms(bound_by_its_device(), batch_scale=0.5) == pytest.approx(550, rel=0.01)


def test_links_scale_what_moves_and_batches_what_grows_with_them() -> None:
    gradients = bound_by_its_device(collective=CollectiveCall("all_reduce", 2**30, None, 0))
    assert step_ms(gradients, link_scale=0.5) == pytest.approx(1900, rel=0.01)
    assert step_ms(gradients, batch_scale=2) == pytest.approx(1000, rel=0.01)
    lookups = bound_by_its_device(collective=CollectiveCall("all_to_all", 2**30, None, 0))
    assert step_ms(lookups, batch_scale=2) == pytest.approx(1900, rel=0.01)
    unknown = bound_by_its_device(collective=CollectiveCall("other", None, None, 0))
    assert step_ms(unknown, link_scale=0.25) == pytest.approx(100 + 3600, rel=0.01)


def test_a_device_without_a_profile_is_said() -> None:
    trace = bound_by_its_device("Some GPU")
    with pytest.raises(InputError, match="Some GPU"):
        what_if([trace], hardware=load_hardware("h100-sxm"))
    assert step_ms(trace, batch_scale=2) == pytest.approx(1900, rel=0.01)


@pytest.mark.parametrize("scale", [0, -1, float("inf"), float("nan")])
def test_scales_above_nothing(scale: float) -> None:
    for name in ("batch_scale", "link_scale"):
        with pytest.raises(InputError, match=name):
            step_ms(bound_by_its_device(), **{name: scale})


@needs_public_data
def test_a_host_bound_job_gains_little_from_a_faster_device() -> None:
    traces = read_traces([TRACES / "dlrm_kineto.tar.gz"])
    found = what_if(traces, hardware=load_hardware("h100-sxm"))
    for step in found.steps:
        assert 0.9 < step.predicted_ms / step.measured_ms <= 1.001
