"""Public traces against figures taken from them by other means; docs/data.md says which."""

import csv
from dataclasses import replace

import pytest

from predictor.trace.breakdown import Intervals, breakdown
from predictor.trace.events import RankTrace, TraceStep
from predictor.trace.read import TraceSet, load_traces
from tests.public_data import FULL, OF_FULL_DATA, TRACES

HTA = {
    "NVIDIA A100-PG509-200 3": "hta_trace_diff_control_rank3of8.json.gz",
    "Tesla V100-SXM2-16GB 1": "hta_trace_diff_test_rank1of2.json.gz",
    "NVIDIA A100-PG509-200 0": "hta_nccl_parser_rank0of2.json.gz",
}

pytestmark = OF_FULL_DATA

Rows = list[dict[str, str]]


def rows(name: str) -> Rows:
    with (FULL / name).open() as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


@pytest.fixture(scope="module")
def eight() -> TraceSet:
    """DLRM on 8 V100: a Kineto trace and an execution trace of every rank."""
    return load_traces([TRACES / "dlrm_pytorch_et.tar.gz", TRACES / "dlrm_kineto.tar.gz"])


def test_ranks_steps_and_counts(eight: TraceSet) -> None:
    measured = rows("trace_param_dlrm8xV100_iteration.csv")
    assert eight.notes == ()
    assert [(t.rank, t.world_size) for t in eight.traces] == [(r, 8) for r in range(8)]
    for trace, row in zip(eight.traces, measured, strict=True):
        (step,) = breakdown(trace)
        assert step.measured_ms == pytest.approx(float(row["profiler_step_ms"]), abs=1e-3)
        assert len(trace.device) == int(row["n_gpu_events"])
        ops = [e for e in trace.host if e.kind == "op"]
        assert len(ops) == int(row["n_cpu_ops"])
        busy = step.measured_ms - step.parts["host_bound"] - step.parts["idle"]
        assert busy == pytest.approx(float(row["gpu_busy_ms"]), abs=1e-3)
        exchange = sum(e.end_us - e.start_us for e in trace.device if e.collective) / 1e3
        assert exchange == pytest.approx(float(row["nccl_sum_ms"]), abs=1e-3)
        # the table counts an exchange beside a copy as hidden, ours as exposed
        exposed = float(row["nccl_exposed_ms"])
        assert (
            exposed - 1e-3
            <= step.parts["exposed_communication"]
            <= exposed + step.parts["memcpy"] + 0.02
        )


def test_collectives(eight: TraceSet) -> None:
    measured = rows("trace_param_dlrm8xV100_collectives.csv")
    read = [
        (trace.rank, event)
        for trace in eight.traces
        for event in sorted(trace.device, key=lambda e: e.collective.order if e.collective else -1)
        if event.collective is not None
    ]
    assert len(read) == len(measured)
    kinds = {"a2a": "all_to_all", "allreduce": "all_reduce"}
    for (rank, event), row in zip(read, measured, strict=True):
        call = event.collective
        assert call is not None
        assert (rank, call.order) == (int(row["rank"]), int(row["idx"]))
        assert call.op == kinds[row["kineto_kind"]]
        assert call.size_bytes == int(row["in_bytes"])
        assert call.output_bytes == int(row["out_bytes"])
        assert event.start_us == float(row["kernel_start_abs_us"])
        assert event.end_us - event.start_us == float(row["kernel_dur_us"])
        item = int(row["elem_bytes"])
        for side, column in (
            (call.send_bytes, "in_or_out_split_a"),
            (call.receive_bytes, "in_or_out_split_b"),
        ):
            splits = tuple(item * int(n) for n in row[column].split("-") if n)
            assert (side or ()) == splits


def test_every_node_finds_its_op(eight: TraceSet) -> None:
    for trace, execution in zip(eight.traces, eight.executions, strict=True):
        assert execution.schema == "1.0.1"
        nodes = {node.id: node for node in execution.nodes}
        tied = [event for event in trace.host if event.node is not None]
        assert len(tied) == len(nodes)
        assert all(nodes[event.node].name == event.name for event in tied)


def test_an_execution_trace_of_one_iteration_serves_all() -> None:
    traces = load_traces([TRACES / f"param_linear_{kind}.json.gz" for kind in ("kineto", "et")])
    (trace,), (execution,) = traces.traces, traces.executions
    ops = [e for e in trace.host if e.kind != "runtime"]
    tied = [e for e in ops if e.node is not None]
    # 40 iterations of one program
    assert len({e.node for e in tied}) == len(execution.nodes)
    assert len(tied) > 0.98 * len(ops)
    nodes = {node.id: node for node in execution.nodes}
    assert all(nodes[e.node].name == e.name for e in tied)


@pytest.mark.parametrize("device_and_rank", HTA)
def test_steps(device_and_rank: str) -> None:
    measured = [
        row
        for row in rows("trace_hta_steps.csv")
        if f"{row['gpu']} {row['rank']}" == device_and_rank
    ]
    (trace,) = load_traces([TRACES / HTA[device_and_rank]]).traces
    assert (trace.device_name, trace.world_size) == (
        measured[0]["gpu"],
        int(measured[0]["world_size"]),
    )
    marks = {e.name: e for e in trace.host if e.name.startswith("ProfilerStep#")}
    assert [s.name for s in trace.steps] == [row["step"] for row in measured]
    for row in measured:
        mark = marks[row["step"]]
        marked = TraceStep(mark.name, mark.start_us, mark.end_us)
        check_step(trace, marked, row)


def check_step(trace: RankTrace, step: TraceStep, row: dict[str, str]) -> None:
    """The table counts kernels to the step they start in, whole."""
    started = [e for e in trace.device if step.start_us <= e.start_us < step.end_us]
    exchange = [e for e in started if e.collective is not None]
    rest = [e for e in started if e.collective is None]
    assert len(started) == int(row["n_gpu_events"])
    assert len(exchange) == int(row["n_nccl_kernels"])

    def running(events: list) -> Intervals:
        return Intervals.merged((e.start_us, e.end_us) for e in events)

    def length(intervals: Intervals) -> float:
        return intervals.within(0, 1e18) / 1e3

    assert length(running(started)) == pytest.approx(float(row["gpu_busy_ms"]), abs=2e-3)
    exposed = running(exchange) - running(rest)
    assert length(exposed) == pytest.approx(float(row["nccl_exposed_ms"]), abs=2e-3)
    total = sum(e.end_us - e.start_us for e in exchange) / 1e3
    assert total == pytest.approx(float(row["nccl_sum_ms"]), abs=2e-3)
    (parts,) = breakdown(replace(trace, steps=(step,)))
    assert parts.measured_ms == pytest.approx(float(row["step_ms"]), abs=1e-3)
    assert sum(parts.parts.values()) == pytest.approx(parts.measured_ms)
    # work of the steps around moves between neighbours, by less than a long kernel
    busy = parts.measured_ms - parts.parts["host_bound"] - parts.parts["idle"]
    longest = max(e.end_us - e.start_us for e in started) / 1e3
    assert busy == pytest.approx(float(row["gpu_busy_ms"]), abs=longest)
