"""From traces of a job to a profile that is right about it: `predictor.learn` with files around."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from predictor.cost.posterior import STEP
from predictor.errors import InputError
from predictor.hardware.learned import Learned
from predictor.hardware.loader import list_hardware
from predictor.learn import Unmatched, learn
from predictor.model.plan import ShardingPlan
from predictor.model.plan_check import model_mismatch
from predictor.model.plan_json import load_plan
from predictor.trace.events import RankTrace
from predictor.trace.phases import Measured, measured_phases
from predictor.trace.read import load_traces
from predictor.units import us
from shardopt.api.given_plans import fit_plan
from shardopt.api.request import Machine
from shardopt.api.setting import Setting, resolve
from shardopt.measure.machine import machine


@dataclass(frozen=True)
class Lesson:
    """Lesson of traces.

    Args:
        before_ms, after_ms: the plan's iteration by the profile, and with what was learned.
        measured_ms: of a step.
        notes: for the user.
    """

    learned: Learned
    unmatched: tuple[Unmatched, ...]
    before_ms: float
    after_ms: float
    measured_ms: float
    notes: tuple[str, ...] = ()

    def as_object(self) -> dict[str, Any]:
        """Return ``factors``, ``unmatched`` and their effect for ``--json``."""
        return {
            "factors": [factor.model_dump() for factor in self.learned.factors],
            "unmatched": [{"name": cost.name, "ms": cost.ms} for cost in self.unmatched],
            "steps": self.learned.steps,
            "measured_ms": self.measured_ms,
            "before_ms": self.before_ms,
            "after_ms": self.after_ms,
        }


def learn_from_traces(
    files: Sequence[Path],
    model: Path,
    plan: Path,
    hardware: str | None = None,
    batch_size: int | None = None,
    step_ms: float | None = None,
) -> tuple[Setting, Lesson]:
    """Learn about the profile from the traces of a job that ran under a plan.

    Args:
        step_ms: of steps that no profiler watched; None: as the traces say.

    Raises:
        InputError: the traces are of another model, plan or number of ranks, or hold no whole step;
            or the time of a step is none.
        PlanError: the plan does not fit the model.
    """
    if step_ms is not None and not 0 < step_ms < math.inf:
        raise InputError(
            f"a step of {step_ms:g} ms: give the ms of a training step without the profiler, such "
            "as 8.7",
            inputs=("step_ms",),
        )
    traced_plan = load_plan(plan)
    setting = resolve(model, Machine(hardware=hardware, batch_size=batch_size), traced_plan)
    doubt = model_mismatch(traced_plan, setting.workload)
    notes = (*setting.notes, *((doubt,) if doubt else ()))
    fitting = fit_plan(traced_plan, setting, where=str(plan))
    lesson = lesson_of(setting, fitting, plan.stem, files, step_ms or 0.0)
    return setting, replace(lesson, notes=(*notes, *lesson.notes))


def lesson_of(
    setting: Setting, plan: ShardingPlan, name: str, files: Sequence[Path], step_ms: float = 0.0
) -> Lesson:
    """Learn from the traces of a plan.

    Args:
        step_ms: of steps that no profiler watched; 0: as the traces say, else what they took less
            the profiler's own time on a GPU's host.
    """
    trace_set = load_traces(files)
    if not trace_set.traces:
        raise InputError("execution traces hold no times; give the Kineto traces")
    ranks = {trace.rank for trace in trace_set.traces}
    sizes = {trace.world_size for trace in trace_set.traces if trace.world_size is not None}
    beyond = [rank for rank in ranks if rank >= plan.world_size]
    if beyond or sizes - {plan.world_size}:
        traced = f"{max(sizes)} ranks" if sizes else f"rank {max(ranks)}"
        raise InputError(
            f"the traces are of {traced}, but plan {name} is for {plan.world_size} ranks; give the "
            "plan of the traced job",
            inputs=("plan",),
        )
    bare = [t.rank for t in trace_set.traces if not t.device and not any(e.shapes for e in t.host)]
    if bare:
        raise InputError(
            f"the trace of rank {bare[0]} holds no shapes of ops, which tell exchanges apart; "
            "record it with record_shapes=True"
        )
    workload, topology = setting.workload, setting.topology
    phases = measured_phases(trace_set.traces, workload.modules, workload.batch_size)
    measured, notes = _untraced(list(phases.measured), trace_set.traces, step_ms)
    decides = _host_decides(measured, trace_set.traces)
    if not decides:
        notes.append(
            "the GPU was busy for most of a step, so traces say nothing of the host, whose costs "
            "stay; `shardopt calibrate --only host` measures them in a minute"
        )
    lookups = {m.what for m in measured if m.what.startswith("lookups.")}
    planned = {
        f"{table.module}.{plan.tables[key].sharding_type.short}"
        for key, table in zip(workload.keys, workload.tables, strict=True)
    }
    strange = sorted({module_type.split(" ", 1)[1] for module_type in lookups} - planned)
    if strange:
        raise InputError(
            f"the traces hold lookups of {', '.join(strange)} (module and sharding type), but plan "
            f"{name} has {', '.join(sorted(planned))}; give the model and plan of the traced job",
            inputs=("model", "plan"),
        )
    about = machine()
    learned, unmatched = learn(
        workload,
        topology,
        setting.hardware,
        plan,
        measured,
        name=name,
        steps=phases.steps,
        machine=trace_set.traces[0].device_name or about["processor"] or about["machine"],
        date=datetime.now(UTC).date().isoformat(),
        host_decides=decides,
    )
    after = setting.hardware.model_copy(update={"learned": learned})
    step = next((m.ms for m in measured if m.what == STEP), 0.0)
    return Lesson(
        learned,
        tuple(unmatched),
        setting.predict(plan).iteration_ms,
        replace(setting, hardware=after).predict(plan).iteration_ms,
        step,
        (*trace_set.notes, *phases.notes, *notes),
    )


PROFILED_US = 4.2
"""Time in us that the profiler adds to a step on a GPU's host for each event recorded with
shapes: 3.1 to 5.4 us in traces of three models on one H200 (torch 2.11), whose untraced steps were
timed as well; and its error."""
PROFILED_ERROR = 0.3
BUSY = 0.8
"""Share of a step from which on a busy GPU decides alone."""


def _untraced(
    measured: list[Measured], traces: Sequence[RankTrace], step_ms: float
) -> tuple[list[Measured], list[str]]:
    """Return the measured times with a step as it is without the profiler, and notes on it."""
    recorded = [t.untraced_step_ms for t in traces if t.untraced_step_ms is not None]
    parts = [m for m in measured if m.what != STEP]
    if step_ms or recorded:
        return [*parts, Measured(STEP, None, step_ms or float(np.median(recorded)))], []
    step = next((m for m in measured if m.what == STEP), None)
    if step is None or not all(trace.device for trace in traces):
        return measured, []
    slowest = max(traces, key=lambda trace: len(trace.host) / len(trace.steps))
    added = 1e-3 * PROFILED_US * len(slowest.host) / len(slowest.steps)
    alone = max(step.ms - added, min(step.ms, _busy_ms(slowest)))
    noise = math.hypot(step.noise, PROFILED_ERROR * (step.ms - alone) / alone)
    note = (
        f"a traced step took {step.ms:.3g} ms, of which the profiler is taken to be "
        f"{step.ms - alone:.3g} ms, good to {PROFILED_ERROR:.0%}; give the time of a step without "
        "it, or record with shardopt.torchrec.record, which measures both"
    )
    return [*parts, replace(step, ms=alone, noise=noise)], [note]


def _busy_ms(trace: RankTrace) -> float:
    """Time of a step in which the device does something."""
    total, end = 0.0, -math.inf
    for event in trace.device:
        total += max(0.0, event.end_us - max(event.start_us, end))
        end = max(end, event.end_us)
    return us(total) / len(trace.steps)


def _host_decides(measured: Sequence[Measured], traces: Sequence[RankTrace]) -> bool:
    """False where every device was busy for all of the step."""
    step = next((m.ms for m in measured if m.what == STEP), 0.0)
    return not all(trace.device and _busy_ms(trace) >= BUSY * step for trace in traces)


def overlay_text(learned: Learned, base: str, folder: Path) -> str:
    """The profile file that holds what was learned on top of another.

    Args:
        base: name or path of the profile below.
        folder: that the file will lie in; a path in it starts there.
    """
    if base not in list_hardware():
        base = os.path.relpath(base, folder)
        base = base if os.sep in base or base.endswith((".yaml", ".yml")) else f".{os.sep}{base}"
    data = {"base": base, "learned": learned.model_dump(mode="json", exclude_none=True)}
    head = (
        f"# {learned.model} on {learned.machine}: {learned.steps} steps of "
        f"{', '.join(learned.plans)}, {learned.date}\n"
        "# Written by `shardopt learn`; factors multiply the costs of the base.\n"
    )
    return head + yaml.safe_dump(data, sort_keys=False, width=100)
