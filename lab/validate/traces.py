"""Real traces simulated step by step and rank by rank, and their kernels of recorded shapes.

No measured start or end of a step's own kernels enters its prediction; see
`predictor.trace.simulate.step`. Nothing is fitted on these files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from lab.statistics import grouped
from lab.suites import SUITES, Cell, ComparedRow, Report
from lab.validate.traced_products import gemm_calls, traced_profile
from predictor.errors import ShardoptError
from predictor.trace.events import RankTrace
from predictor.trace.read import load_traces
from predictor.trace.simulate.overheads import TracedOverheads
from predictor.trace.simulate.step import SimulatedStep, SimulatedTrace, TracedHosts, simulate_trace

SUITE = SUITES["traces"]
*STEPS, RANKS = SUITE.tables
ONE_STEP = "param_"
"""Prefix of public traces with one step of one rank."""
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
FORECASTS = (OTHER_STEPS, OTHER_TRACES, NAIVE, OWN_HOST, OTHER_RANKS, OUTSIDE)
"""Forecasts in the column order of the table of steps."""


def validate_traces(folder: Path) -> Report:
    """Simulate every trace in ``folder``.

    Raises:
        InputError: one of the public files is no trace.
    """
    names = list(SUITE.tables)
    there = [name for name in names if (folder / name).is_file()]
    traces_of = {name: load_traces([folder / name]).traces for name in there}
    missing = [f"{name}: not there" for name in names if name not in traces_of]
    for name in _further(folder):
        try:
            traces_of[name] = load_traces([folder / name]).traces
            simulate_trace(traces_of[name])
        except ShardoptError as error:
            traces_of.pop(name, None)
            missing.append(f"{name}: {error}")
    rows = list(_single({name: traces for name, traces in traces_of.items() if name != RANKS}))
    of_ranks: dict[str, SimulatedTrace] = {}
    if RANKS in traces_of:
        for part, own in ((OWN_HOST, True), (OTHER_RANKS, False)):
            of_ranks[part] = simulate_trace(traces_of[RANKS], own_host=own)
            rows += [_row(RANKS, step, step.predicted_ms, part) for step in of_ranks[part].steps]
    tables = SUITE.table("ends of collectives", _ends(of_ranks)), SUITE.table("steps", _steps(rows))
    gemms = (row for name, traces in traces_of.items() for row in _gemms(name, traces))
    return SUITE.report([*rows, *gemms], missing, scores=tables)


def _further(folder: Path) -> list[str]:
    """Return the names of other traces in the folder, without those of a single step."""
    there = sorted((folder / "traces").glob("*.json*"))
    names = [f"traces/{path.name}" for path in there if not path.name.startswith(ONE_STEP)]
    return [name for name in names if name not in STEPS]


def _single(traces_of: dict[str, Sequence[RankTrace]]) -> Iterator[ComparedRow]:
    hosts = {name: TracedHosts.of(traces) for name, traces in traces_of.items()}
    for name, traces in traces_of.items():
        for step in simulate_trace(traces).steps:
            yield _row(name, step, step.predicted_ms, OUTSIDE if step.outside else OTHER_STEPS)
            if step.naive_ms is not None and not step.outside:
                yield _row(name, step, step.naive_ms, NAIVE)
        other_hosts = [host.pooled() for other, host in hosts.items() if other != name]
        if other_hosts:
            for step in simulate_trace(traces, overheads=TracedOverheads(other_hosts)).steps:
                if not step.outside:
                    yield _row(name, step, step.predicted_ms, OTHER_TRACES)


def _short(name: str) -> str:
    return name.removeprefix("traces/").split(".")[0]


def _row(name: str, step: SimulatedStep, predicted_ms: float, part: str) -> ComparedRow:
    where: dict[str, str | int | float] = {
        **{"trace": _short(name), "rank": step.rank, "step": step.step}
    }
    source = SOURCES.get(name, name)
    return ComparedRow(where, step.measured_ms, predicted_ms, _short(name), part, source)


def _gemms(name: str, traces: Sequence[RankTrace]) -> Iterator[ComparedRow]:
    """Yield a row for each shape: the median of its kernels against the device's profile."""
    hw = traced_profile(traces[0])
    every = [call for trace in traces for call in gemm_calls(trace)]
    shapes = grouped(every, lambda gemm: (gemm.count, gemm.m, gemm.n, gemm.k, gemm.data_type))
    for (*sizes, data_type), calls in shapes.items():
        if hw is None or data_type not in hw.gemm.tflops:
            continue
        shape = f"{'x'.join(map(str, sizes))} {data_type}"
        yield ComparedRow(
            {"trace": _short(name), "rank": shape, "step": "all"},
            median(sum(k.end_us - k.start_us for k in call.kernels) for call in calls) / 1e3,
            calls[0].predicted_ms(hw),
            f"{hw.name}, {_short(name)}",
            GEMM,
            SOURCES.get(name, name),
        )


def _ends(simulations: Mapping[str, SimulatedTrace]) -> Iterator[tuple[Cell, ...]]:
    """Yield the mean and largest error of the ends of collectives in us."""
    for part, simulated in simulations.items():
        for name, collectives in grouped(simulated.collectives, lambda c: c.name).items():
            off = [1e3 * (c.predicted_end_ms - c.measured_end_ms) for c in collectives]
            yield part, name, len(off), sum(map(abs, off)) / len(off), max(map(abs, off))


def _steps(rows: Sequence[ComparedRow]) -> Iterator[tuple[Cell, ...]]:
    """Yield every step with its forecasts."""
    for step, step_rows in grouped(rows, lambda row: tuple(row.name.values())).items():
        errors = {row.part: row.error for row in step_rows}
        yield (*step, step_rows[0].measured_ms, *(errors.get(part) for part in FORECASTS))
