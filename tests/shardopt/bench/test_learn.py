"""`shardopt learn` on traces of CPU ranks: what fits, and what says so instead of a traceback."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from predictor.hardware.loader import load_hardware
from predictor.trace.events import RankTrace, TraceStep
from predictor.trace.phases import Measured
from shardopt.bench.learn import PROFILED_US, _host_decides, _untraced
from shardopt.cli.app import main
from tests.predictor.trace.handmade import Recorder

MODEL = """
schema: 1
name: small
batch_size: 512
tables:
  - {name: a, num_embeddings: 40000, embedding_dim: 32, features: [{name: fa, pooling_factor: 8}]}
  - {name: b, num_embeddings: 90000, embedding_dim: 32, features: [{name: fb, pooling_factor: 4}]}
dense: {in_features: 4, bottom_mlp: [32], interaction: dot, top_mlp: [16, 1]}
"""
STEPS = 3


def plan(world_size: int = 2, sharding_type: str = "table_wise") -> dict[str, Any]:
    rows = {"a": 40000, "b": 90000}

    def shards(rank: int, height: int) -> list[dict[str, Any]]:
        if sharding_type == "table_wise":
            return [{"rank": rank, "offset": [0, 0], "size": [height, 32]}]
        half = height // world_size
        return [{"rank": r, "offset": [r * half, 0], "size": [half, 32]} for r in range(world_size)]

    tables = {
        name: {
            "sharding_type": sharding_type,
            "compute_kernel": "fused",
            "shards": shards(i, height),
        }
        for i, (name, height) in enumerate(rows.items())
    }
    return {
        "schema": "shardopt.plan/1",
        "world_size": world_size,
        "local_world_size": world_size,
        "hardware": "cpu-gloo",
        "tables": tables,
    }


def trace(
    rank: int, *, world_size: int = 2, module: str = "sparse.ebc", batch: int = 512, calls: int = 1
) -> dict[str, Any]:
    """Steps of 20 ms: ids for 1 ms, lookups of 2 and 4, outputs of 1, dense of 5 and 6."""
    events: list[dict[str, Any]] = []

    def add(name: str, at: float, ms: float, tid: int = 1, **args: Any) -> None:
        cat = "cpu_op" if "::" in name else "user_annotation"
        events.append(
            {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": 1e3 * at,
             "dur": 1e3 * ms, "args": args}
        )  # fmt: skip

    for step in range(STEPS):
        at = 100 + 20.0 * step
        add(f"ProfilerStep#{step}", at, 20)
        add("## forward ##", at, 9.9)
        for _ in range(calls):
            sizes = {"Input Dims": [[6144]], "Input type": ["long int"]}
            add("gloo:all_to_all", at + 0.5 + 0.1 * rank, 1.0 - 0.1 * rank, tid=2, **sizes)
        add(f"[lookup]_[{module}]_[table_wise]", at + 2, 2)
        ops = {"Sequence number": 7 + 10 * step}
        add("fbgemm::split_embedding_codegen_lookup_function", at + 2.5, 1.4, **ops)
        outputs = {"Input Dims": [[16384]], "Input type": ["float"]}
        add("gloo:all_to_all", at + 4, 1.0, tid=2, **outputs)
        shapes = {"Input Dims": [[batch, 1], [batch, 1]], "Input type": ["float", "float"]}
        loss = {"Sequence number": 8 + 10 * step, **shapes}
        add("aten::binary_cross_entropy_with_logits", at + 6, 2.9, **loss)
        add("## backward ##", at + 10, 9.5)
        node = "autograd::engine::evaluate_function: "
        add(f"{node}Loss", at + 10.2, 5.0, **{"Sequence number": 8 + 10 * step})
        add(f"{node}CppNode<SplitLookupFunction>", at + 15.4, 4.0, **ops)
    return {
        "schemaVersion": 1,
        "distributedInfo": {"backend": "gloo", "rank": rank, "world_size": world_size},
        "traceEvents": events,
    }


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "model.yaml").write_text(MODEL)
    write(tmp_path, plan(), [trace(0), trace(1)])
    return tmp_path


def write(job: Path, planned: dict[str, Any], traces: list[dict[str, Any]]) -> None:
    (job / "plan.json").write_text(json.dumps(planned))
    (job / "traces").mkdir(exist_ok=True)
    for old in (job / "traces").iterdir():
        old.unlink()
    for i, trace in enumerate(traces):
        (job / "traces" / f"{i}.json").write_text(json.dumps(trace))


def learn(job: Path, *more: str) -> int:
    words = ["learn", str(job / "traces"), "--model", str(job / "model.yaml")]
    words += ["--plan", str(job / "plan.json"), "-o", str(job / "learned.yaml"), *more]
    return main(words)


def test_phases_of_a_trace_become_factors(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert learn(job, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["measured_ms"] == pytest.approx(20)
    assert document["steps"] == STEPS
    assert document["unmatched"] == []
    assert abs(document["after_ms"] - 20) < abs(document["before_ms"] - 20)
    spent = {(f["group"], f["table"]): f["evidence_ms"] for f in document["factors"]}
    assert spent["lookups", None] > 2 * 2 + 2 * 4  # of two ranks, and their share of a step
    assert ("lookups.backward", "b") in spent
    learned = load_hardware(str(job / "learned.yaml")).learned
    assert learned is not None
    measured = {e.what: e.measured_ms for e in learned.evidence}
    assert measured["exchanges.ids"] == pytest.approx(0.9)  # of the rank that came last
    assert measured["lookups.forward ebc.TW of rank 1"] == pytest.approx(2)
    assert measured["lookups.backward ebc.TW of rank 0"] == pytest.approx(4)
    assert measured["rest of rank 0"] == pytest.approx(0.5)  # behind the backward


def test_exchanges_in_flight_at_once_share_their_time(job: Path) -> None:
    write(job, plan(), [trace(0, calls=2), trace(1, calls=2)])
    assert learn(job) == 0
    learned = load_hardware(str(job / "learned.yaml")).learned
    assert learned is not None
    measured = {e.what: e.measured_ms for e in learned.evidence}
    assert measured["exchanges.ids"] == pytest.approx(0.9)


def test_a_step_that_ranks_do_not_share_is_left_out(job: Path) -> None:
    """The record of an exchange may end behind the border of its step."""
    cut = trace(1)
    first = next(e for e in cut["traceEvents"] if e["name"] == "gloo:all_to_all")
    cut["traceEvents"].remove(first)
    write(job, plan(), [trace(0), cut])
    assert learn(job) == 0
    learned = load_hardware(str(job / "learned.yaml")).learned
    assert learned is not None
    assert learned.steps == STEPS - 1


def test_a_profile_that_has_learned_learns_more(job: Path) -> None:
    assert learn(job) == 0
    (job / "learned.yaml").rename(job / "first.yaml")
    assert learn(job, "--hardware", str(job / "first.yaml")) == 0
    learned = load_hardware(str(job / "learned.yaml")).learned
    assert learned is not None
    assert learned.steps == 2 * STEPS


def without_shapes(trace: dict[str, Any]) -> dict[str, Any]:
    for event in trace["traceEvents"]:
        event["args"] = {k: v for k, v in event["args"].items() if not k.startswith("Input")}
    return trace


@pytest.mark.parametrize(
    ("planned", "traces", "says"),
    [
        (plan(), [trace(0), trace(1, calls=2)], "ranks disagree on step 0"),
        (plan(4, "row_wise"), [trace(0), trace(1)], "the traces are of 2 ranks"),
        (plan(2, "row_wise"), [trace(0), trace(1)], "hold lookups of ebc.TW"),
        (plan(), [trace(0, module="sparse.other")], "hold lookups of sparse.other.TW"),
        (plan(), [trace(0, batch=64), trace(1, batch=64)], "of 64 samples per rank"),
        (plan(), [trace(0), without_shapes(trace(1))], "rank 1 holds no shapes"),
    ],
)
def test_traces_of_something_else_are_refused(
    job: Path,
    planned: dict[str, Any],
    traces: list[dict[str, Any]],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(job, planned, traces)
    assert learn(job) == 2
    assert says in capsys.readouterr().err
    assert not (job / "learned.yaml").exists()


def test_traces_of_another_model_are_refused(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (job / "model.yaml").write_text(MODEL.replace("name: b,", "name: c,"))
    assert learn(job) == 2
    assert "plan.json" in capsys.readouterr().err


def gpu_trace(busy_us: float, step_us: float = 1000.0) -> RankTrace:
    recorder = Recorder()
    for at in range(3):
        start = at * step_us
        recorder.steps.append(TraceStep(at, start, start + step_us))
        for op in range(50):
            recorder.op("aten::add", start + 10 * op, start + 10 * op + 5)
        recorder.launch((start, start + 5), (start + 5, start + 5 + busy_us))
    return recorder.trace()


STEP_OF_1_MS = [Measured("step", None, 1.0, 0.01)]


def test_the_profilers_own_time_is_taken_off_a_gpus_step() -> None:
    trace = gpu_trace(busy_us=200)
    measured, notes = _untraced(STEP_OF_1_MS, [trace], 0.0)
    events = len(trace.host) / 3
    assert measured[0].ms == pytest.approx(1.0 - 1e-3 * PROFILED_US * events)
    assert measured[0].noise > 0.05
    assert "record" in notes[0]


@pytest.mark.parametrize("source", ["given", "in the trace"])
def test_a_step_that_no_profiler_watched_counts(source: str) -> None:
    recorded = 0.7 if source == "in the trace" else None
    trace = replace(gpu_trace(busy_us=200), untraced_step_ms=recorded)
    measured, notes = _untraced(STEP_OF_1_MS, [trace], 0.6 if source == "given" else 0.0)
    assert measured[-1].ms == (recorded or 0.6)
    assert not notes


@pytest.mark.parametrize(("busy_us", "decides"), [(200, True), (990, False)])
def test_a_busy_gpu_says_nothing_of_its_host(busy_us: float, decides: bool) -> None:
    assert _host_decides(STEP_OF_1_MS, [gpu_trace(busy_us)]) is decides


@pytest.mark.parametrize("step_ms", ["0", "-3", "nan", "inf"])
def test_a_step_without_a_time_is_refused(
    job: Path, capsys: pytest.CaptureFixture[str], step_ms: str
) -> None:
    args = ["learn", str(job / "traces"), "--model", str(job / "model.yaml")]
    args += ["--plan", str(job / "plan.json"), "-o", str(job / "x.yaml"), f"--step-ms={step_ms}"]
    assert main(args) == 2
    assert "ms" in capsys.readouterr().err
    assert not (job / "x.yaml").exists()
