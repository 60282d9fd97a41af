"""Real traces simulated: step by step, rank by rank, and kernels whose shapes they carry.

No measured start or end of what a step launched enters its prediction; the text of
`predictor.trace.simulate.step` says what does. Nothing is fitted on these files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from lab.validate.report import ComparedRow, Report, Scores, data_folder
from predictor.errors import ShardoptError
from predictor.trace.events import RankTrace
from predictor.trace.read import read_traces
from predictor.trace.simulate.overheads import Overheads
from predictor.trace.simulate.step import SimulatedStep, SimulatedTrace, TracedHosts, simulate_trace
from predictor.trace.simulate.whatif import GemmCall, gemm_calls, traced_profile

STEPS = (
    "traces/hta_nccl_parser_rank0of2.json.gz",
    "traces/hta_trace_diff_control_rank3of8.json.gz",
    "traces/hta_trace_diff_test_rank1of2.json.gz",
)
RANKS = "traces/dlrm_kineto.tar.gz"
ONE_STEP = "param_"
"""Begins the names of public traces that hold one step of one rank."""
SOURCES = {
    RANKS: "facebookresearch/param et_replay/tests/inputs",
    **dict.fromkeys(STEPS, "facebookresearch/HolisticTraceAnalysis tests/data"),
}

OTHER_STEPS = "steps, host times of the other steps"
OTHER_TRACES = "steps, host times of the other traces"
NAIVE = "steps, the median of the other steps"
OUTSIDE = "steps that began before the trace"
OWN_HOST = "8 ranks, their own host times"
OTHER_RANKS = "8 ranks, host times of the other ranks"
GEMM = "GEMM kernels by shape"


def validate_traces(folder: Path) -> Report:
    """Simulate every trace in ``folder``.

    Raises:
        InputError: the folder or the files are not there, or one is no trace.
    """
    names = (*STEPS, RANKS)
    data_folder(folder, names)
    found = {name: read_traces([folder / name]) for name in names if (folder / name).is_file()}
    missing = [f"{name}: not there" for name in names if name not in found]
    for name in _further(folder):
        try:
            found[name] = read_traces([folder / name])
            simulate_trace(found[name])
        except ShardoptError as error:
            found.pop(name, None)
            missing.append(f"{name}: {error}")
    rows: list[ComparedRow] = []
    ends: list[tuple[str, SimulatedTrace]] = []
    single = {name: traces for name, traces in found.items() if name != RANKS}
    rows += _single(single)
    if RANKS in found:
        for part, own in ((OWN_HOST, True), (OTHER_RANKS, False)):
            simulated = simulate_trace(found[RANKS], own_host=own)
            rows += [_row(RANKS, step, step.predicted_ms, part) for step in simulated.steps]
            ends.append((part, simulated))
    for name, traces in found.items():
        rows += _gemms(name, traces)
    return Report(
        "traces",
        tuple(rows),
        OTHER_STEPS,
        tuple(missing),
        NOTES,
        held_out=(OTHER_TRACES, NAIVE, OUTSIDE, OWN_HOST, OTHER_RANKS, GEMM),
        scores=(_ends(ends), _steps(rows)),
    )


NOTES = (
    "a step that waited for work launched before the trace is marked and counts in no mean",
    "pauses of 5 ms or more in which the host waited for something else than the device, such as "
    "data, are the step's own and not predicted",
    "two rules were chosen with these files in sight: a kernel waits while another fills the "
    "device, and which of several collectives a stream waits for; neither has a fitted constant",
    "in a trace of one rank, collectives take as long as traced, including the wait for other "
    "ranks; in the traces of 8 ranks, as long as on the last rank to arrive",
    "lookups are not compared, as no trace records how ids are distributed over rows",
)


def _further(folder: Path) -> list[str]:
    """Other traces of several steps that were put there; those of one step have no other step."""
    there = sorted((folder / "traces").glob("*.json*"))
    names = [f"traces/{path.name}" for path in there if not path.name.startswith(ONE_STEP)]
    return [name for name in names if name not in STEPS]


def _single(found: dict[str, list[RankTrace]]) -> Iterator[ComparedRow]:
    hosts = {name: TracedHosts.of(traces) for name, traces in found.items()}
    for name, traces in found.items():
        for step in simulate_trace(traces).steps:
            yield _row(name, step, step.predicted_ms, OUTSIDE if step.outside else OTHER_STEPS)
            if step.naive_ms is not None and not step.outside:
                yield _row(name, step, step.naive_ms, NAIVE)
        others = [host.pooled() for other, host in hosts.items() if other != name]
        if others:
            table = Overheads(others)
            for step in simulate_trace(traces, overheads=table).steps:
                if not step.outside:
                    yield _row(name, step, step.predicted_ms, OTHER_TRACES)


def _row(name: str, step: SimulatedStep, predicted_ms: float, part: str) -> ComparedRow:
    trace = name.removeprefix("traces/").split(".")[0]
    where: dict[str, str | int | float] = {"trace": trace, "rank": step.rank, "step": step.step}
    return ComparedRow(where, step.measured_ms, predicted_ms, trace, part, SOURCES.get(name, name))


def _gemms(name: str, traces: Sequence[RankTrace]) -> Iterator[ComparedRow]:
    """One row a shape: the median of its kernels against the profile of the device."""
    hw = traced_profile(traces[0])
    shapes: dict[tuple[int, int, int, int, str], list[GemmCall]] = {}
    for trace in traces:
        for call in gemm_calls(trace):
            key = (call.count, call.m, call.n, call.k, call.data_type)
            shapes.setdefault(key, []).append(call)
    for (count, m, n, k, data_type), calls in shapes.items():
        if hw is None or data_type not in hw.gemm.tflops:
            continue
        trace_name = name.removeprefix("traces/").split(".")[0]
        shape = f"{count}x{m}x{n}x{k} {data_type}"
        yield ComparedRow(
            {"trace": trace_name, "rank": shape, "step": "all"},
            median(sum(k.end_us - k.start_us for k in call.kernels) for call in calls) / 1e3,
            calls[0].predicted_ms(hw),
            f"{hw.name}, {trace_name}",
            GEMM,
            SOURCES.get(name, name),
        )


def _ends(found: Sequence[tuple[str, SimulatedTrace]]) -> Scores:
    """How far the ends of collectives are from the traced ones."""
    rows = []
    for part, simulated in found:
        names = dict.fromkeys(c.name for c in simulated.collectives)
        for name in names:
            off = [
                1e3 * (c.predicted_end_ms - c.measured_end_ms)
                for c in simulated.collectives
                if c.name == name
            ]
            rows.append((part, name, len(off), sum(map(abs, off)) / len(off), max(map(abs, off))))
    return Scores(
        "ends of collectives",
        (
            ("part", "text"),
            ("collective", "text"),
            ("ranks", "count"),
            ("mean error, us", "figure"),
            ("worst, us", "figure"),
        ),
        tuple(rows),
        "predicted against traced end of each collective on each rank, from the first rank's start",
    )


def _steps(rows: Sequence[ComparedRow]) -> Scores:
    """Every step with its forecasts."""
    by_step: dict[tuple[str, int, int], dict[str, ComparedRow]] = {}
    for row in rows:
        if row.part != GEMM:
            key = (str(row.name["trace"]), int(row.name["rank"]), int(row.name["step"]))
            by_step.setdefault(key, {})[row.part] = row
    cells = []
    for (trace, rank, step), found in by_step.items():
        measured = next(iter(found.values())).measured_ms
        forecasts = (OTHER_STEPS, OTHER_TRACES, NAIVE, OWN_HOST, OTHER_RANKS, OUTSIDE)
        errors = [found[part].error if part in found else None for part in forecasts]
        cells.append((trace, rank, step, measured, *errors))
    return Scores(
        "steps",
        (
            ("trace", "text"),
            ("rank", "count"),
            ("step", "count"),
            ("measured", "ms"),
            ("other steps", "signed"),
            ("other traces", "signed"),
            ("naive", "signed"),
            ("own host", "signed"),
            ("other ranks", "signed"),
            ("began outside", "signed"),
        ),
        tuple(cells),
        "errors by where host times come from; naive: the median of the trace's other steps",
    )
