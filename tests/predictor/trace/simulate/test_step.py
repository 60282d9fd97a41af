"""Hand-made traces whose times follow from their structure, and public ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.errors import InputError
from predictor.trace.events import CollectiveCall, DeviceEvent, HostEvent, RankTrace, TraceStep
from predictor.trace.read import load_traces, set_back
from predictor.trace.simulate.host import Kind
from predictor.trace.simulate.step import SimulatedTrace, simulate_trace
from tests.predictor.trace.handmade import AUTOGRAD, PAGEABLE, Recorder, joined, longer
from tests.public_data import TRACES, needs_public_data


def reads_the_loss(steps: int = 3) -> RankTrace:
    """Each step of 400 us: two kernels that queue, and a copy that the host waits for.

    Launched at 20-30 and 50-60; ``large`` runs 32-232, ``small`` 233-243, the copy, called at 80,
    244-246. The call returns 10 us later, at 256.
    """
    record = Recorder()
    for number in range(steps):
        at = 400.0 * number
        record.step(at, at + 400)
        record.op("aten::mm", at + 10, at + 35)
        record.launch((at + 20, at + 30), (at + 32, at + 232), name="large")
        record.op("aten::add", at + 40, at + 65)
        record.launch((at + 50, at + 60), (at + 233, at + 243), name="small")
        record.op("aten::item", at + 70, at + 260)
        record.launch(
            (at + 80, at + 256), (at + 244, at + 246), name=PAGEABLE, runtime="cudaMemcpyAsync"
        )
    return record.trace()


def last(simulated: SimulatedTrace) -> float:
    return 1e3 * simulated.steps[-1].predicted_ms


def test_alike_steps_take_what_they_took() -> None:
    simulated = simulate_trace([reads_the_loss()])
    assert [s.measured_ms for s in simulated.steps] == pytest.approx([0.4] * 3)
    assert [s.predicted_ms for s in simulated.steps] == pytest.approx([0.4] * 3, rel=0.01)
    assert simulated.steps[0].naive_ms == pytest.approx(0.4)


def test_a_longer_kernel_moves_the_step_by_as_much() -> None:
    trace = reads_the_loss()
    base = last(simulate_trace([trace]))
    for factor, moves in ((2.0, 200), (0.5, -100)):
        changed = longer(trace, "large", factor, since_us=800)
        assert last(simulate_trace([changed])) == pytest.approx(base + moves, abs=1e-6)


@pytest.mark.parametrize(("size", "waits"), [(65_536, False), (65_537, True)])
def test_large_copies_from_pageable_memory_hold_the_host(size: int, waits: bool) -> None:
    """The call lasts as long as the copy; a small copy is staged and the call returns at once."""
    record = Recorder()
    length = 110 if waits else 10
    for at in (0.0, 300.0):
        record.step(at, at + 300)
        record.op("aten::to", at + 10, at + 150)
        record.launch(
            (at + 20, at + 20 + length),
            (at + 25, at + 125),
            name="Memcpy HtoD (Pageable -> Device)",
            runtime="cudaMemcpyAsync",
        )
    trace = record.trace()
    trace = replace(trace, device=tuple(replace(e, size_bytes=size) for e in trace.device))
    base = last(simulate_trace([trace]))
    assert base == pytest.approx(300, rel=0.01)
    moves = last(simulate_trace([longer(trace, "HtoD", 1.5, since_us=300)])) - base
    assert moves == pytest.approx(50 if waits else 0, abs=1e-6)


def trains(steps: int = 3, launch_us: float = 10.0) -> RankTrace:
    """Forward on the main thread, backward on autograd's, then the main thread goes on."""
    record = Recorder()
    for number in range(steps):
        at = 300.0 * number
        record.step(at, at + 300)
        record.op("aten::mm", at + 10, at + 40)
        record.launch((at + 20, at + 20 + launch_us), (at + 32, at + 52))
        record.op("autograd::engine::evaluate_function: Mm", at + 100, at + 150, AUTOGRAD)
        record.launch((at + 110, at + 110 + launch_us), (at + 122, at + 182), thread=AUTOGRAD)
        record.op("aten::add_", at + 200, at + 230)
        record.launch((at + 210, at + 210 + launch_us), (at + 222, at + 232))
    return record.trace()


def test_threads_that_wake_each_other_follow_each_other() -> None:
    assert last(simulate_trace([trains()])) == pytest.approx(300, rel=0.01)
    trace = trains()
    slow = tuple(
        replace(e, end_us=e.end_us + 25) if e.name.startswith("autograd") else e for e in trace.host
    )
    # the operator's end is 25 us later, and what the main thread took to wake 25 us less
    assert last(simulate_trace([replace(trace, host=slow)])) == pytest.approx(300, rel=0.01)


def exchanges(start: float, kernel: float, meet: float, end: float) -> Recorder:
    """A rank: a kernel, an all-to-all that waits for the others, a copy of the result to the host.

    Args:
        start: of the step. kernel: its length. meet: when the last rank arrives.
    """
    record = Recorder()
    record.step(start, end)
    record.op("aten::mm", start + 5, start + 25)
    record.launch((start + 10, start + 20), (start + 22, start + 22 + kernel), name="work")
    record.op("c10d::alltoall_base_", start + 30, start + 60)
    begins = max(start + 22 + kernel, start + 52)
    record.launch(
        (start + 40, start + 50),
        (begins, meet + 100),
        name="ncclKernel_SendRecv",
        stream=20,
        collective=CollectiveCall("all_to_all", 1024, (0, 1), 0),
    )
    record.op("record_param_comms", start + 70, start + 80)
    record.call("cudaStreamWaitEvent", start + 72, start + 74)
    record.op("aten::item", start + 85, end - 20)
    record.launch(
        (start + 90, end - 30), (meet + 101, meet + 103), name=PAGEABLE, runtime="cudaMemcpyAsync"
    )
    return record


def two_ranks(late_us: float = 0.0, work_us: float = 300.0) -> list[RankTrace]:
    """Rank 1 begins ``late_us`` later and works 300 us, rank 0 ``work_us``; both end together."""
    meet = max(22 + work_us, late_us + 322)
    return joined(
        [exchanges(0, work_us, meet, meet + 140), exchanges(late_us, 300.0, meet, meet + 140)]
    )


def test_a_collective_takes_what_it_took_on_the_last_rank() -> None:
    simulated = simulate_trace(two_ranks(late_us=500), own_host=True)
    ends = [c.predicted_end_ms for c in simulated.collectives]
    assert ends == pytest.approx([0.922, 0.922], abs=0.005)
    for step in simulated.steps:
        assert step.predicted_ms == pytest.approx(step.measured_ms, abs=0.02)


def test_the_rank_that_comes_last_sets_the_step_of_all() -> None:
    traces = two_ranks(late_us=500)
    later = simulate_trace([traces[0], set_back(traces[1], -200)], own_host=True)
    base = simulate_trace(traces, own_host=True)
    moves = [b.predicted_ms - a.predicted_ms for a, b in zip(base.steps, later.steps, strict=True)]
    assert moves == pytest.approx([0.2, 0.0], abs=1e-6)
    longer_there = [traces[0], longer(traces[1], "work", 2.0)]
    after = simulate_trace(longer_there, own_host=True)
    moves = [b.predicted_ms - a.predicted_ms for a, b in zip(base.steps, after.steps, strict=True)]
    assert moves == pytest.approx([0.3, 0.3], abs=1e-6)
    hidden = simulate_trace([longer(traces[0], "work", 2.0), traces[1]], own_host=True)
    assert hidden.steps == base.steps, "rank 0 had time to spare"


def test_what_is_missing_is_said() -> None:
    with pytest.raises(InputError, match="no trace"):
        simulate_trace([])
    with pytest.raises(InputError, match="single step of a single rank"):
        simulate_trace([reads_the_loss(1)])
    with pytest.raises(InputError, match="the same number of steps"):
        simulate_trace([reads_the_loss(2), reads_the_loss(3)])


times = st.floats(0, 1000).map(lambda t: round(t, 1))
calls = st.sampled_from(
    ["cudaLaunchKernel", "cudaMemcpyAsync", "cudaStreamWaitEvent", "cudaStreamSynchronize"]
)
host_events = st.builds(
    lambda name, kind, thread, start, length, number: HostEvent(
        name, kind, thread, start, start + length, number if kind == "runtime" else None
    ),
    calls | st.sampled_from(["aten::mm", "record_param_comms", "autograd::engine::x"]),
    st.sampled_from(["op", "annotation", "runtime"]),
    st.integers(1, 3),
    times,
    times,
    st.integers(1, 6),
)
device_events = st.builds(
    lambda name, stream, start, length, number, joins: DeviceEvent(
        name,
        "memcpy" if name.startswith("Memcpy") else "kernel",
        stream,
        start,
        start + length,
        number,
        collective=CollectiveCall("all_reduce", 8, None, number) if joins else None,
        waves=length / 100,
    ),
    st.sampled_from(["kernel", PAGEABLE]),
    st.integers(7, 9),
    times,
    times,
    st.integers(1, 7),
    st.booleans(),
)


@given(st.lists(st.tuples(st.lists(host_events), st.lists(device_events)), min_size=1, max_size=3))
@settings(max_examples=75, deadline=None)
def test_odd_traces_are_replayed_or_refused(
    ranks: list[tuple[list[HostEvent], list[DeviceEvent]]],
) -> None:
    traces = [
        RankTrace(
            f"rank{rank}",
            rank,
            len(ranks),
            None,
            tuple(sorted(host, key=lambda e: e.start_us)),
            tuple(sorted(device, key=lambda e: e.start_us)),
            (TraceStep("a", 0, 500), TraceStep("b", 500, 1000)),
        )
        for rank, (host, device) in enumerate(ranks)
    ]
    for own_host in (False, True):
        try:
            simulated = simulate_trace(traces, own_host=own_host)
        except InputError:
            continue
        assert all(0 <= s.predicted_ms < 1e6 for s in simulated.steps)
        assert sum(s.duration_ms for s in simulated.critical_path) == pytest.approx(
            simulated.timeline.iteration_ms[0], abs=1e-6
        )


def single(name: str) -> list[RankTrace]:
    return list(load_traces([TRACES / name]).traces)


@needs_public_data
@pytest.mark.parametrize(
    ("name", "mean"),
    [("hta_nccl_parser_rank0of2.json.gz", 0.02), ("hta_trace_diff_test_rank1of2.json.gz", 0.03)],
)
def test_steps_of_public_traces(name: str, mean: float) -> None:
    """From the second step on: what the device does at the start of a trace is not known."""
    steps = simulate_trace(single(name)).steps[1:]
    errors = [abs(s.predicted_ms / s.measured_ms - 1) for s in steps]
    assert sum(errors) / len(errors) < mean
    longest, shortest = (pick(steps, key=lambda s: s.measured_ms) for pick in (max, min))
    if longest.measured_ms > 1.5 * shortest.measured_ms:
        assert longest.predicted_ms > 1.5 * shortest.predicted_ms


@needs_public_data
def test_eight_ranks_end_when_they_did() -> None:
    traces = single("dlrm_kineto.tar.gz")
    simulated = simulate_trace(traces, own_host=True)
    for step in simulated.steps:
        assert step.predicted_ms == pytest.approx(step.measured_ms, rel=0.02)
    for collective in simulated.collectives:
        assert collective.predicted_end_ms == pytest.approx(collective.measured_end_ms, abs=0.05)
    assert len(simulated.collectives) == 64


def loads_data(pauses: Sequence[float], loader: bool = False) -> RankTrace:
    """Steps of 1 ms of host work and a pause, before it or in the loader's own operator."""
    record, at = Recorder(), 0.0
    for pause in pauses:
        record.step(at, at + pause + 1000)
        if loader:
            record.op("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", at, at + pause)
        at += pause
        for number in range(4):
            begin = at + 200 * number
            record.op("aten::mm", begin + 20, begin + 100)
            record.launch((begin + 40, begin + 50), (begin + 52, begin + 60))
        at += 1000
    return record.trace()


@pytest.mark.parametrize("loader", [False, True])
def test_waiting_for_data_is_the_steps_own(loader: bool) -> None:
    pauses = [135e3, 20e3, 60e3]
    simulated = simulate_trace([loads_data(pauses, loader)])
    assert [s.predicted_ms for s in simulated.steps] == pytest.approx([136, 21, 61], rel=0.01)
    assert simulated.overheads.find(Kind.T1).us < 1000


def test_a_first_step_that_began_before_the_trace_is_marked() -> None:
    trace = reads_the_loss()
    assert not any(step.outside for step in simulate_trace([trace]).steps)
    assert not simulate_trace([trace]).notes
    unlaunched = DeviceEvent("kernel", "kernel", 7, 5, 30, correlation=999)
    early = replace(trace, device=(unlaunched, *trace.device))
    simulated = simulate_trace([early])
    assert [step.outside for step in simulated.steps] == [True, False, False]
    assert any("before the trace" in note for note in simulated.notes)
