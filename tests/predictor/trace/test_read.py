"""Traces of several ranks: what is missing between them, and what does not fit."""

from pathlib import Path

from predictor.trace.read import load_traces, read_traces
from tests.predictor.trace.synthetic import OLDEST, execution, kineto, write


def notes(*paths: Path) -> str:
    return "\n".join(load_traces(paths).notes)


def test_by_rank_whatever_the_order(tmp_path: Path) -> None:
    paths = [write(tmp_path, f"r{r}.json", kineto(r)) for r in (1, 0)]
    assert [t.rank for t in read_traces(paths)] == [0, 1]
    assert notes(*paths) == ""


def test_missing_ranks(tmp_path: Path) -> None:
    path = write(tmp_path, "r.json", kineto(1, world_size=4))
    assert "ranks 0, 2, 3 of 4 not given" in notes(path)


def test_missing_members_of_a_group(tmp_path: Path) -> None:
    assert "rank 1 of 2 not given" in notes(write(tmp_path, "r.json", kineto(0, world_size=1)))


def test_duplicate_ranks_keep_the_first(tmp_path: Path) -> None:
    paths = [write(tmp_path, f"{name}.json", kineto(0)) for name in ("a", "b")]
    found = load_traces(paths)
    assert [t.source for t in found.traces] == [str(paths[0])]
    assert any(f"{paths[1]}: left out, as {paths[0]}" in note for note in found.notes)


def test_world_sizes_that_differ(tmp_path: Path) -> None:
    paths = [write(tmp_path, f"{r}.json", kineto(r, world_size=2 + r)) for r in (0, 1)]
    assert "different world sizes: 2, 3" in notes(*paths)


def test_execution_traces_find_their_rank(tmp_path: Path) -> None:
    paths = [write(tmp_path, f"et_{r}.json", execution(r)) for r in (0, 1)]
    paths += [write(tmp_path, f"rank{r}.json", kineto(r, schema=OLDEST)) for r in (0, 1)]
    found = load_traces(paths)
    assert [e.rank for e in found.executions] == [0, 1]
    for trace in found.traces:
        assert sum(e.node is not None for e in trace.host) == 10


def test_an_execution_trace_too_many(tmp_path: Path) -> None:
    paths = [write(tmp_path, "et_1.json", execution(1)), write(tmp_path, "k.json", kineto(0))]
    assert "no times for rank 1: execution traces without their Kineto traces" in notes(*paths)


def test_a_trace_of_the_host_alone(tmp_path: Path) -> None:
    document = kineto(0)
    document["traceEvents"] = [
        e for e in document["traceEvents"] if e.get("cat") in ("cpu_op", "user_annotation")
    ]
    (trace,) = load_traces([write(tmp_path, "k.json", document)]).traces
    assert any("no device events" in note for note in trace.notes)


def test_a_trace_of_the_device_alone(tmp_path: Path) -> None:
    document = kineto(0)
    document["traceEvents"] = [
        e for e in document["traceEvents"] if e.get("cat") in ("kernel", "gpu_memcpy")
    ]
    (trace,) = load_traces([write(tmp_path, "k.json", document)]).traces
    assert any("no host events" in note for note in trace.notes)
    # the kernels say themselves what they exchange
    assert [e.collective.order for e in trace.device if e.collective] == [0, 1]
