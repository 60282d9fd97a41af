"""Measured and predicted timelines in one file."""

from pathlib import Path

import pytest

from predictor.trace.chrome import comparison_trace
from predictor.trace.read import read_traces
from predictor.trace.simulate.step import simulate_trace
from tests.predictor.trace.synthetic import kineto, write


def test_both_begin_the_last_step_at_zero(tmp_path: Path) -> None:
    paths = [write(tmp_path, f"rank{r}.json", kineto(r, steps=3)) for r in (0, 1)]
    traces = read_traces(paths)
    drawn = comparison_trace(traces, simulate_trace(traces), meta={"plan": "x"})
    assert drawn["otherData"] == {"plan": "x"}
    events = drawn["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    for rank in (0, 1):
        starts = {
            names[e["pid"]]: e["ts"]
            for e in events
            if e["ph"] == "X" and "add_kernel" in e["name"] and not e["name"].startswith("issue")
        }
        measured, predicted = (
            starts[f"rank {rank} {which}"] for which in ("measured", "predicted")
        )
        assert measured == pytest.approx(620)
        # the host times come from steps that are the same
        assert predicted == pytest.approx(measured, abs=60)


def test_measured_alone(tmp_path: Path) -> None:
    traces = read_traces([write(tmp_path, "rank0.json", kineto())])
    events = comparison_trace(traces, None)["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"rank 0 measured"}
    assert sum(e["ph"] == "X" for e in events) == len(traces[0].host) + len(traces[0].device)
