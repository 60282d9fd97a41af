"""Traces of several ranks: what is missing between them, and what does not fit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from predictor.trace.read import align, attach, clock_offsets, load_traces
from tests.predictor.trace.synthetic import (
    OLD,
    OLDEST,
    RECENT,
    execution,
    kineto,
    read_kineto,
    write,
)


def notes(*paths: Path) -> str:
    return "\n".join(load_traces(paths).notes)


def test_missing_ranks(tmp_path: Path) -> None:
    path = write(tmp_path, "r.json", kineto(1, world_size=4))
    assert "ranks 0, 2, 3 of 4 not given" in notes(path)


def test_duplicate_ranks_keep_the_first(tmp_path: Path) -> None:
    paths = [write(tmp_path, f"{name}.json", kineto(0)) for name in ("a", "b")]
    traces = load_traces(paths)
    assert [t.source for t in traces.traces] == [str(paths[0])]
    assert any(f"{paths[1]}: left out, as {paths[0]}" in note for note in traces.notes)


def test_execution_traces_find_their_rank(tmp_path: Path) -> None:
    paths = [write(tmp_path, f"et_{r}.json", execution(r)) for r in (0, 1)]
    paths += [write(tmp_path, f"rank{r}.json", kineto(r, schema=OLDEST)) for r in (0, 1)]
    traces = load_traces(paths)
    assert [e.rank for e in traces.executions] == [0, 1]
    for trace in traces.traces:
        assert sum(e.node is not None for e in trace.host) == 10


def test_a_trace_of_the_host_alone(tmp_path: Path) -> None:
    document = kineto(0)
    document["traceEvents"] = [
        e for e in document["traceEvents"] if e.get("cat") in ("cpu_op", "user_annotation")
    ]
    (trace,) = load_traces([write(tmp_path, "k.json", document)]).traces
    assert any("no device events" in note for note in trace.notes)


def test_align_steps_over_what_one_side_lacks() -> None:
    short = [f"op{i}" for i in range(40)]
    long = ["x", *short[:15], "new", "new", *short[15:25], *short[26:], "y"]
    pairs = align(short, long)
    assert [i for i, _ in pairs] == [*range(25), *range(26, 40)]
    assert all(short[i] == long[j] for i, j in pairs)


@pytest.mark.parametrize("schema", [RECENT, OLD])
@pytest.mark.parametrize("nested", [False, True])
def test_ops_get_their_nodes(tmp_path: Path, schema: str, nested: bool) -> None:
    """By the number of the call since PyTorch 2.4, by the order of names before; every step."""
    trace = read_kineto(write(tmp_path, "k.json", kineto(schema=schema)))
    bare = replace(
        trace,
        host=tuple(replace(e, shapes=None, dtypes=None) for e in trace.host),
        device=tuple(
            replace(e, collective=e.collective and replace(e.collective, size_bytes=None))
            for e in trace.device
        ),
        notes=("2 collectives without a size; record shapes, or give execution traces",),
    )
    (run,) = load_traces([write(tmp_path, "et_0.json", execution(nested=nested))]).executions
    tied = attach(bare, run)
    steps = 1 if schema == RECENT else 2
    named = [(e.name, e.node) for e in tied.host if e.node is not None]
    assert named == steps * [
        ("aten::mm", 3),
        ("c10d::allreduce_", 4),
        ("record_param_comms", 5),
        ("nccl:all_reduce", 6),
        ("aten::add", 7),
    ]
    product = next(e for e in tied.host if e.name == "aten::mm")
    assert (product.shapes, product.dtypes) == (((10, 10), (10, 10)), ("float", "float"))
    sizes = [e.collective.size_bytes for e in tied.device if e.collective]
    assert sizes == ([4000, None] if steps == 1 else [4000, 4000])
    assert tied.notes == (
        ("1 collectives without a size; record shapes, or give execution traces",)
        if steps == 1
        else ()
    )


def test_another_program_is_left_out(tmp_path: Path) -> None:
    document = execution()
    for node in document["nodes"]:
        node["name"] = f"other::{node['id']}"
    trace = read_kineto(write(tmp_path, "k.json", kineto()))
    (run,) = load_traces([write(tmp_path, "et_0.json", document)]).executions
    tied = attach(trace, run)
    assert tied.host == trace.host
    assert "of another program: only 0%" in tied.notes[-1]


@pytest.mark.parametrize("shift", [0.0, 300.0, 20_000.0, -20_000.0])
def test_clocks(tmp_path: Path, shift: float) -> None:
    """Small differences stay: collectives do not end at the very same time."""
    paths = [write(tmp_path, f"{r}.json", kineto(r, start_us=1e6 + shift * r)) for r in (0, 1)]
    assert clock_offsets([read_kineto(p) for p in paths]) == pytest.approx({0: 0.0, 1: shift})
    traces = load_traces(paths)
    first, second = traces.traces
    if abs(shift) < 1000:
        assert traces.notes == ()
        assert second.steps[0].start_us - first.steps[0].start_us == pytest.approx(shift)
    else:
        assert f"rank 1 by {shift / 1e3:+.3f} ms" in traces.notes[0]
        assert second.steps == first.steps
        assert second.device == first.device
        assert second.host == first.host


def renamed(document: dict[str, Any]) -> dict[str, Any]:
    for event in document["traceEvents"]:
        args = event.get("args", {})
        if "Collective name" in args:
            args["Collective name"] = "all_to_all"
    return document


def test_other_collectives(tmp_path: Path) -> None:
    paths = [write(tmp_path, "0.json", kineto(0)), write(tmp_path, "1.json", renamed(kineto(1)))]
    (note,) = load_traces(paths).notes
    assert "the one at position 0 is all_reduce on rank 0, all_to_all on rank 1" in note
