"""``shardopt trace``: what a PyTorch trace says, and what the predictor makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from predictor.errors import InputError
from shardopt.report.blocks import View

if TYPE_CHECKING:
    from predictor.trace.read import TraceSet
    from predictor.trace.simulate.step import SimulatedTrace
    from predictor.trace.simulate.whatif import PlanSwap


def trace(
    files: list[Path],
    trace: Path | None = None,
    dense: Path | None = None,
    batch_size: int | None = None,
    hardware: str | None = None,
    batch_scale: float | None = None,
    link_scale: float | None = None,
    swap_plan: tuple[Path, Path, Path] | None = None,
) -> View:
    """Show where the time of each traced step goes, and predict the steps.

    Arguments:
        files (FILE...): Kineto and execution traces, one file per rank: .json, .json.gz, .tar.gz,
            or folders of these.

    Output:
        trace (FILE): Write the measured and the predicted timeline to this file, for
            ui.perfetto.dev or chrome://tracing.
        dense (FILE): Write what the dense part of the traced job took to this file, as the section
            'dense' of a model file.
        batch_size (N): Samples per GPU of the traced job, for --dense; by the shapes of the loss if
            left out.

    What if:
        hardware (NAME|FILE): Predict the steps on this hardware.
        batch_scale (X): Predict the steps with X times the batch size.
        link_scale (X): Predict the steps with links between ranks that are X times as fast.
        swap_plan (MODEL OLD NEW): Predict the steps under the plan NEW of MODEL; the trace was
            recorded under OLD.
    """
    from predictor.trace.read import load_traces
    from shardopt.cli.output import check_writable
    from shardopt.report.trace import trace_view

    check_writable(trace, files)
    check_writable(dense, files)
    changed = {"hardware": hardware, "batch_scale": batch_scale, "link_scale": link_scale}
    what_if: dict[str, Any] = {name: value for name, value in changed.items() if value is not None}
    if swap_plan is not None:
        what_if["plan"] = str(swap_plan[2])
    found = load_traces(files)
    simulated, notes = _replay(found, what_if, swap_plan)
    if trace is not None:
        _write_timeline(trace, found, simulated)
        notes.append(f"wrote {trace}; open it at ui.perfetto.dev")
    if dense is not None:
        notes += _write_dense(dense, found, batch_size)
    return trace_view(found, simulated, what_if, notes)


def _replay(
    found: TraceSet, what_if: dict[str, Any], swap: tuple[Path, Path, Path] | None
) -> tuple[SimulatedTrace | None, list[str]]:
    """The prediction, or why there is none: a breakdown needs less than that.

    Raises:
        InputError: something was to be changed and nothing can be predicted.
    """
    from predictor.trace.simulate.step import simulate_trace

    if what_if:
        return _changed(found, what_if, swap), []
    if not any(trace.device for trace in found.traces):
        return None, []
    try:
        return simulate_trace(found.traces), []
    except InputError as error:
        return None, [f"no prediction: {error}"]


def _changed(
    found: TraceSet, asked: dict[str, Any], swap: tuple[Path, Path, Path] | None
) -> SimulatedTrace:
    from predictor.hardware.loader import load_hardware
    from predictor.trace.simulate.whatif import what_if

    if not any(trace.device for trace in found.traces):
        raise InputError(
            f"--{next(iter(asked)).replace('_', '-')} needs Kineto traces with device work; "
            "these have none"
        )
    given = {name: value for name, value in asked.items() if name != "plan"}
    if "hardware" in asked:
        given["hardware"] = load_hardware(asked["hardware"])
    plans = None if swap is None else _swapped(found, *swap)
    return what_if(found.traces, **given, plans=plans)


def _swapped(found: TraceSet, model: Path, old: Path, new: Path) -> PlanSwap:
    """The traced device stands for the hardware of both plans."""
    from predictor.model.plan_json import load_plan
    from predictor.trace.simulate.whatif import plan_swap, traced_profile
    from shardopt.api.given_plans import fit_plan
    from shardopt.api.request import Machine
    from shardopt.api.setting import resolve

    hardware = traced_profile(found.traces[0])
    if hardware is None:
        raise InputError(
            f"--swap-plan: no profile describes the device {found.traces[0].device_name!r}"
        )
    setting = resolve(model, Machine(hardware=hardware.name), load_plan(old))
    plans = [fit_plan(load_plan(path), setting, where=str(path)) for path in (old, new)]
    return plan_swap(found.traces, setting.workload, setting.topology, hardware, *plans)


def _write_timeline(path: Path, found: TraceSet, simulated: SimulatedTrace | None) -> None:
    from predictor.trace.chrome import comparison_trace
    from shardopt.api.cache import versions
    from shardopt.cli.output import write_json

    if not found.traces:
        raise InputError(
            "--trace: execution traces hold no times to draw; give the Kineto traces too"
        )
    write_json(path, comparison_trace(found.traces, simulated, meta={"versions": versions()}))


def _write_dense(path: Path, found: TraceSet, batch_size: int | None) -> list[str]:
    """Writes the section and says how it was made."""
    from dataclasses import replace

    from predictor.trace.phases import PHASES, traced_dense
    from shardopt.config.write import dense_text
    from shardopt.files import atomic_write_text
    from shardopt.formatting import ms, plural

    if batch_size is not None and batch_size < 1:
        raise InputError(f"--batch-size is {batch_size}; it must be at least 1")
    if not found.traces:
        raise InputError("--dense: execution traces hold no times; give the Kineto traces too")
    traced = traced_dense(found.traces, batch_size)
    times = {f"{phase}_ms": round(getattr(traced.measured, f"{phase}_ms"), 4) for phase in PHASES}
    measured = replace(traced.measured, **times)
    source = (
        f"the dense part of {plural(len(found.traces), 'rank')}, median of {traced.steps} steps"
    )
    atomic_write_text(path, dense_text(measured, [source, *traced.notes]))
    shown = ", ".join(f"{phase} {ms(times[f'{phase}_ms'])}" for phase in PHASES)
    return [*traced.notes, f"wrote {path}: {shown} at a batch of {measured.batch_size}"]
