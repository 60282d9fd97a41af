"""Waiting for data is a step's own time, and a step that began before its trace is marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from predictor.trace.events import DeviceEvent, RankTrace
from predictor.trace.simulate.host import Kind
from predictor.trace.simulate.step import simulate_trace
from tests.predictor.trace.handmade import Recorder


def queues_a_kernel(steps: int = 3) -> RankTrace:
    """Steps of 400 us, each with a kernel launched at 20 that runs from 32 to 232."""
    record = Recorder()
    for number in range(steps):
        at = 400.0 * number
        record.step(at, at + 400)
        record.op("aten::mm", at + 10, at + 35)
        record.launch((at + 20, at + 30), (at + 32, at + 232))
    return record.trace()


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
    found = simulate_trace([loads_data(pauses, loader)])
    assert [s.predicted_ms for s in found.steps] == pytest.approx([136, 21, 61], rel=0.01)
    assert found.overheads.find(Kind.T1).us < 1000


def test_a_short_pause_is_predicted_from_other_steps() -> None:
    found = simulate_trace([loads_data([3000, 1000, 1000])])
    assert found.steps[0].predicted_ms == pytest.approx(2.0, rel=0.1)


def test_a_first_step_that_began_before_the_trace_is_marked() -> None:
    trace = queues_a_kernel()
    assert not any(step.outside for step in simulate_trace([trace]).steps)
    assert not simulate_trace([trace]).notes
    unlaunched = DeviceEvent("kernel", "kernel", 7, 5, 30, correlation=999)
    early = replace(trace, device=(unlaunched, *trace.device))
    found = simulate_trace([early])
    assert [step.outside for step in found.steps] == [True, False, False]
    assert any("before the trace" in note for note in found.notes)


def test_a_synchronisation_before_all_work_waits_for_what_no_trace_shows() -> None:
    record = Recorder()
    for number in range(2):
        at = 400.0 * number
        record.step(at, at + 400)
        if not number:
            record.op("aten::item", at + 1, at + 200)
            record.call("cudaDeviceSynchronize", at + 2, at + 199)
        record.op("aten::mm", at + 210, at + 235)
        record.launch((at + 220, at + 230), (at + 232, at + 300))
    assert [s.outside for s in simulate_trace([record.trace()]).steps] == [True, False]
