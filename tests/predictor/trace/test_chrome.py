"""Chrome traces of hand-made iterations, whose times are known."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from predictor.iteration.critical_path import critical_path
from predictor.iteration.graph import Graph
from predictor.iteration.timeline import simulate
from predictor.predict import Prediction
from predictor.trace.chrome import chrome_trace, comparison_trace
from predictor.trace.read import load_traces
from predictor.trace.simulate.step import simulate_trace
from tests.predictor.trace.synthetic import kineto, write


def prediction() -> Prediction:
    """Two ranks: a lookup of 1 and 3 ms, then a collective of 2 ms, then 1 ms of dense work."""
    graph = Graph(2, 2)
    lookup = graph.add(
        "lookup",
        phase="embedding_forward",
        resource="embedding",
        stream="compute",
        cost_ms=np.array([1.0, 3.0]),
        host_ms=0.25,
    )
    exchange = graph.add(
        "all-to-all",
        phase="output_dist_forward",
        resource="collectives",
        stream="comm",
        cost_ms=2.0,
        deps=[lookup],
        scope="world",
    )
    graph.add(
        "absent",
        phase="dense_forward",
        resource="gemm",
        stream="compute",
        cost_ms=5.0,
        active=np.array([False]),
    )
    graph.add(
        "dense",
        phase="dense_forward",
        resource="gemm",
        stream="compute",
        cost_ms=1.0,
        deps=[exchange],
        blocks_host=True,
    )
    timeline = simulate(graph, keep_steps=True)
    path = critical_path(graph, timeline)
    period = float(timeline.iteration_ms[0])
    return Prediction(period, (period, period), {}, (), (), "derived", tuple(path), graph, timeline)


def events(trace: dict, name: str) -> list[dict]:
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and e["name"] == name]


def test_one_track_per_rank_and_stream() -> None:
    trace = chrome_trace(prediction())
    named = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in trace["traceEvents"]
        if e["name"] == "thread_name"
    }
    assert named == {
        (rank, track): stream
        for rank in (0, 1)
        for track, stream in enumerate(("host", "compute", "comm"))
    }
    processes = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert processes == ["rank 0", "rank 1"]


def test_times_are_microseconds_and_collectives_meet() -> None:
    trace = chrome_trace(prediction(), iterations=1)
    first, second = events(trace, "lookup")
    assert (first["dur"], second["dur"]) == pytest.approx((1000, 3000))
    starts = [e["ts"] for e in events(trace, "all-to-all")]
    assert starts == pytest.approx([second["ts"] + 3000] * 2)
    (wait,) = events(trace, "wait for ranks: all-to-all")
    assert (wait["pid"], wait["cat"]) == (0, "wait")
    assert wait["dur"] == pytest.approx(2000)
    (dense, _) = events(trace, "dense")
    assert dense["args"]["phase"] == "dense_forward"


def test_the_critical_path_is_marked_on_the_rank_that_set_it() -> None:
    trace = chrome_trace(prediction(), iterations=1)
    marked = {e["pid"] for e in events(trace, "lookup") if e["args"].get("critical")}
    assert marked == {1}


@pytest.mark.parametrize("iterations", [1, 2, 99])
def test_tracks_never_overlap_and_start_at_zero(iterations: int) -> None:
    trace = chrome_trace(prediction(), iterations=iterations)
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert min(e["ts"] for e in spans) >= 0
    for track in {(e["pid"], e["tid"]) for e in spans}:
        ours = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if (e["pid"], e["tid"]) == track)
        for (_, end), (start, _) in pairwise(ours):
            assert start >= end - 1e-6


def test_both_begin_the_last_step_at_zero(tmp_path: Path) -> None:
    paths = [write(tmp_path, f"rank{r}.json", kineto(r, steps=3)) for r in (0, 1)]
    traces = load_traces(paths).traces
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
