"""``shardopt trace``: what a PyTorch trace says, and what the predictor makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from predictor.errors import InputError
from shardopt.report.blocks import View

if TYPE_CHECKING:
    from predictor.trace.read import TraceSet
    from predictor.trace.simulate.step import SimulatedTrace


def trace(
    files: list[Path],
    trace: Path | None = None,
    dense: Path | None = None,
    batch_size: int | None = None,
) -> View:
    """Show where the time of each traced step goes, and predict the steps.

    Arguments:
        files (FILE...): Kineto and execution traces, one file per rank: .json, .json.gz, .tar.gz,
            or folders of these.

    Output:
        trace (FILE): Write the measured and the predicted timeline to this file, for
            ui.perfetto.dev or chrome://tracing.
        dense (FILE): Write the measured times of the traced job's dense part to this file, as the
            section 'dense' of a model file.
        batch_size (N): Samples per GPU of the traced job, for --dense; by default derived from the
            shape of the loss.
    """
    from predictor.trace.read import load_traces
    from shardopt.cli.output import check_writable
    from shardopt.report.trace import trace_view

    check_writable(trace, files)
    check_writable(dense, files)
    traces = load_traces(files)
    simulated, notes = _simulate(traces)
    if trace is not None:
        _write_timeline(trace, traces, simulated)
        notes.append(f"wrote {trace}; open it at ui.perfetto.dev")
    if dense is not None:
        notes += _write_dense(dense, traces, batch_size)
    return trace_view(traces, simulated, notes)


def _simulate(traces: TraceSet) -> tuple[SimulatedTrace | None, list[str]]:
    """Return the prediction, or a note why there is none; the breakdown does not need it."""
    from predictor.trace.simulate.step import simulate_trace

    if not any(trace.device for trace in traces.traces):
        return None, []
    try:
        return simulate_trace(traces.traces), []
    except InputError as error:
        return None, [f"no prediction: {error}"]


def _write_timeline(path: Path, traces: TraceSet, simulated: SimulatedTrace | None) -> None:
    from predictor.trace.chrome import comparison_trace
    from shardopt.api.cache import versions
    from shardopt.cli.output import write_json

    if not traces.traces:
        raise InputError(
            "--trace: execution traces hold no times to draw; give the Kineto traces too"
        )
    write_json(path, comparison_trace(traces.traces, simulated, meta={"versions": versions()}))


def _write_dense(path: Path, traces: TraceSet, batch_size: int | None) -> list[str]:
    """Write the section and return notes on how it was made."""
    from dataclasses import replace

    from predictor.trace.phases import PHASES, traced_dense
    from shardopt.config.write import dense_text
    from shardopt.files import atomic_write_text
    from shardopt.formatting import ms, plural

    if batch_size is not None and batch_size < 1:
        raise InputError(f"--batch-size is {batch_size}; it must be at least 1")
    if not traces.traces:
        raise InputError("--dense: execution traces hold no times; give the Kineto traces too")
    traced = traced_dense(traces.traces, batch_size)
    measured = traced.dense.measured
    times = {f"{phase}_ms": round(getattr(measured, f"{phase}_ms"), 4) for phase in PHASES}
    dense = replace(traced.dense, measured=replace(measured, **times))
    source = (
        f"the dense part of {plural(len(traces.traces), 'rank')}, median of {traced.steps} steps"
    )
    atomic_write_text(path, dense_text(dense, [source, *traced.notes]))
    shown = ", ".join(f"{phase} {ms(times[f'{phase}_ms'])}" for phase in PHASES)
    return [*traced.notes, f"wrote {path}: {shown} at a batch of {measured.batch_size}"]
