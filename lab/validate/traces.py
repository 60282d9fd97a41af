"""Real traces simulated: step by step, rank by rank, and kernels whose shapes they carry.

No measured start or end of what a step launched enters its prediction; the text of
`predictor.trace.simulate.step` says what does. Nothing is fitted on these files.
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
from predictor.trace.simulate.overheads import Overheads
from predictor.trace.simulate.step import SimulatedStep, SimulatedTrace, TracedHosts, simulate_trace

SUITE = SUITES["traces"]
*STEPS, RANKS = SUITE.tables
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
FORECASTS = (OTHER_STEPS, OTHER_TRACES, NAIVE, OWN_HOST, OTHER_RANKS, OUTSIDE)
"""In the order of the columns of the table of steps."""


def validate_traces(folder: Path) -> Report:
    """Simulate every trace in ``folder``.

    Raises:
        InputError: one of the public files is no trace.
    """
    names = list(SUITE.tables)
    there = [name for name in names if (folder / name).is_file()]
    found = {name: load_traces([folder / name]).traces for name in there}
    missing = [f"{name}: not there" for name in names if name not in found]
    for name in _further(folder):
        try:
            found[name] = load_traces([folder / name]).traces
            simulate_trace(found[name])
        except ShardoptError as error:
            found.pop(name, None)
            missing.append(f"{name}: {error}")
    rows = list(_single({name: traces for name, traces in found.items() if name != RANKS}))
    of_ranks: dict[str, SimulatedTrace] = {}
    if RANKS in found:
        for part, own in ((OWN_HOST, True), (OTHER_RANKS, False)):
            of_ranks[part] = simulate_trace(found[RANKS], own_host=own)
            rows += [_row(RANKS, step, step.predicted_ms, part) for step in of_ranks[part].steps]
    tables = SUITE.table("ends of collectives", _ends(of_ranks)), SUITE.table("steps", _steps(rows))
    gemms = (row for name, traces in found.items() for row in _gemms(name, traces))
    return SUITE.report([*rows, *gemms], missing, scores=tables)


def _further(folder: Path) -> list[str]:
    """Other traces of several steps that were put there; those of one step have no other step."""
    there = sorted((folder / "traces").glob("*.json*"))
    names = [f"traces/{path.name}" for path in there if not path.name.startswith(ONE_STEP)]
    return [name for name in names if name not in STEPS]


def _single(found: dict[str, Sequence[RankTrace]]) -> Iterator[ComparedRow]:
    hosts = {name: TracedHosts.of(traces) for name, traces in found.items()}
    for name, traces in found.items():
        for step in simulate_trace(traces).steps:
            yield _row(name, step, step.predicted_ms, OUTSIDE if step.outside else OTHER_STEPS)
            if step.naive_ms is not None and not step.outside:
                yield _row(name, step, step.naive_ms, NAIVE)
        others = [host.pooled() for other, host in hosts.items() if other != name]
        if others:
            for step in simulate_trace(traces, overheads=Overheads(others)).steps:
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
    """One row a shape: the median of its kernels against the profile of the device."""
    hw = traced_profile(traces[0])
    every = [call for trace in traces for call in gemm_calls(trace)]
    shapes = grouped(every, lambda of: (of.count, of.m, of.n, of.k, of.data_type))
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


def _ends(found: Mapping[str, SimulatedTrace]) -> Iterator[tuple[Cell, ...]]:
    """How far the ends of collectives are from the traced ones."""
    for part, simulated in found.items():
        for name, of in grouped(simulated.collectives, lambda c: c.name).items():
            off = [1e3 * (c.predicted_end_ms - c.measured_end_ms) for c in of]
            yield part, name, len(off), sum(map(abs, off)) / len(off), max(map(abs, off))


def _steps(rows: Sequence[ComparedRow]) -> Iterator[tuple[Cell, ...]]:
    """Every step with its forecasts."""
    for step, of in grouped(rows, lambda row: tuple(row.name.values())).items():
        found = {row.part: row.error for row in of}
        yield (*step, of[0].measured_ms, *(found.get(part) for part in FORECASTS))
