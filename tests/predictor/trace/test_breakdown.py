"""Breakdown of a step's time, on steps with known parts and on drawn ones."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.trace.breakdown import breakdown, short_name
from predictor.trace.events import (
    CollectiveCall,
    DeviceEvent,
    HostEvent,
    HostKind,
    RankTrace,
    TraceStep,
)
from tests.predictor.trace import synthetic
from tests.predictor.trace.synthetic import kineto, read_kineto, write


@pytest.fixture
def trace(tmp_path: Path) -> RankTrace:
    return read_kineto(write(tmp_path, "rank0.json", kineto(steps=3)))


def test_parts(trace: RankTrace) -> None:
    for step in breakdown(trace)[:2]:
        assert step.measured_ms == pytest.approx(1.0)
        assert step.parts == pytest.approx(
            {
                "compute": synthetic.COMPUTE_MS,
                "exposed_communication": synthetic.EXPOSED_MS,
                "memcpy": synthetic.MEMCPY_MS,
                "host_bound": synthetic.HOST_BOUND_MS,
                "idle": synthetic.IDLE_MS,
            }
        )
        assert step.hidden_communication_ms == pytest.approx(synthetic.HIDDEN_MS)


def test_work_past_the_end_counts_where_it_runs(trace: RankTrace) -> None:
    kernel = DeviceEvent("k", "kernel", 7, trace.steps[0].end_us - 10, trace.steps[0].end_us + 30)
    first, second, _ = breakdown(replace(trace, device=(*trace.device, kernel)))
    assert first.parts["compute"] == pytest.approx(synthetic.COMPUTE_MS + 0.01)
    assert second.parts["compute"] == pytest.approx(synthetic.COMPUTE_MS + 0.03)


def test_a_host_alone(trace: RankTrace) -> None:
    """Ops compute, but for those that enqueue a collective; gloo's threads exchange."""
    start = trace.steps[0].start_us

    def event(name: str, kind: HostKind, begin: float, end: float) -> HostEvent:
        return HostEvent(name, kind, 1, start + begin, start + end)

    host = (
        event("aten::mm", "op", 100, 300),
        event("aten::t", "op", 110, 120),
        event("c10d::allreduce_", "op", 300, 320),
        event("gloo:all_reduce", "annotation", 200, 600),
        event("ProfilerStep#3", "annotation", 0, 1000),
    )
    first = breakdown(replace(trace, host=host, device=()))[0]
    assert first.parts == pytest.approx(
        {"compute": 0.2, "exposed_communication": 0.3, "memcpy": 0, "host_bound": 0.5, "idle": 0}
    )
    assert first.hidden_communication_ms == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::(anonymous namespace)::cat<float, A<2> >(B<int>)", "at::native::cat"),
        ("volta_sgemm_64x64_tn", "volta_sgemm_64x64_tn"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD (Device -> Device)"),
        ("void f<g(int)>::h(int (*)[3])", "f::h"),
        ("<>", "<>"),
        ("a>b", "a>b"),
        (
            "void cutlass::Kernel<cutlass_80_gemm_64x64_nn>(cutlass_80_gemm_64x64_nn::Params)",
            "cutlass_80_gemm_64x64_nn",
        ),
        ("void cutlass::device_kernel<a::Gemm<int, 4> >(a::Gemm<int, 4>::Params)", "a::Gemm"),
        ("void cutlass::Kernel<(int)2>(int)", "cutlass::Kernel"),
        ("void f<int>::Kernel<g>(int)", "f::Kernel"),
        ("_Z3addIfEvPT_", "add"),
        ("_ZN2at6native12_GLOBAL__N_13catIfEEvPT_", "at::native::cat"),
        (
            "_ZN7cutlass6KernelINS_4conv6kernel4GemmINS_5ShapeILi128EEEEEEEvNT_6ParamsE",
            "conv::kernel::Gemm",
        ),
        ("_ZN7cutlass6KernelIfEEvT_", "cutlass::Kernel"),
        ("_Z" + "9" * 5000, "_Z" + "9" * 5000),
    ],
)
def test_short_names(name: str, short: str) -> None:
    assert short_name(name) == short


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["compute", "exchange", "copy"]),
        st.integers(-20, 120),
        st.integers(0, 40),
        st.integers(0, 30) | st.none(),
    ),
    max_size=12,
)


@given(EVENTS, st.lists(st.integers(0, 100), min_size=2, max_size=4, unique=True))
def test_every_moment_counts_once(drawn: list, edges: list[int]) -> None:
    """Against a walk over whole microseconds."""
    call = CollectiveCall("all_reduce", None, None, 0)
    device, host = [], []
    for number, (kind, start, length, ahead) in enumerate(drawn):
        device.append(
            DeviceEvent(
                kind,
                "memcpy" if kind == "copy" else "kernel",
                7,
                start,
                start + length,
                number,
                collective=call if kind == "exchange" else None,
            )
        )
        if ahead is not None:
            launch = start - ahead
            host.append(HostEvent("launch", "runtime", 1, launch - 1, launch, number))
    edges = sorted(edges)
    steps = tuple(TraceStep(str(a), a, b) for a, b in pairwise(edges))
    order = sorted(device, key=lambda e: e.start_us)
    trace = RankTrace("x", 0, 1, None, tuple(host), tuple(order), steps)
    for step in breakdown(trace):
        begin = int(step.step)
        end = begin + round(step.measured_ms * 1e3)
        running = [
            {e.name for e in device if e.start_us <= t < e.end_us} for t in range(begin, end)
        ]
        expected = {
            "compute": sum("compute" in r for r in running),
            "exposed_communication": sum("exchange" in r and "compute" not in r for r in running),
            "memcpy": sum(r == {"copy"} for r in running),
        }
        parts = {part: 1e3 * value for part, value in step.parts.items()}
        assert {part: parts[part] for part in expected} == pytest.approx(expected)
        assert sum(parts.values()) == pytest.approx(end - begin)
        assert all(value >= 0 for value in parts.values())
        hidden = sum({"exchange", "compute"} <= r for r in running)
        assert 1e3 * step.hidden_communication_ms == pytest.approx(hidden)
