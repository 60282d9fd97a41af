"""Models of several architectures run for real by TorchRec on CPU ranks, against predictions.

Their dense parts are captured from the modules that ran (`lab.rankers`);
constants are those of the calibration made before the tasks. Beside the prediction stands what the
same dense part is predicted to take if only its linear layers are known, each once a sample.

Why: docs/decisions/0012-dense-parts-tested-by-running.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lab.architecture import architecture_of
from lab.tasks.task_set import MeasuredTask, TaskSet, task_reference
from lab.validate.report import Cell, Report, Scores, geomean, relative_errors, shape_errors
from lab.validate.tasks.ablations import FULL
from lab.validate.tasks.gains import load_quiet
from lab.validate.tasks.tables import (
    Array,
    Pair,
    by_task,
    held_out,
    intervals,
    join_arrays,
    order_row,
    picking,
    ranking,
    truth,
    within,
)
from lab.validate.tasks.task_prediction import (
    TaskPrediction,
    correct_drift,
    drift_ratios,
    predict_task,
)
from predictor.model.captured import CapturedDense
from predictor.model.workload import DenseArch, Workload
from shardopt.calibrate.fitting import mape

NAME = "architectures"
PLANS, SEEN = "plans blind", "plans looked at"
LOOKED_AT = frozenset({"2026-11-22-plain"})
"""Task sets of which profiles of ranks said what the predictor missed (decision 0012)."""
DLRM = "dlrm"
BESIDE = 0.7
"""Cores that other work may keep busy in a round that counts. The committed rounds ran on a machine
with other work, which had the time that the ranks, ahead of it by priority, left while they waited
for each other."""
FEWEST_ROUNDS = 3
"""Of a task that count; of fewer the median says little."""
LINEARS = "linear layers once a sample"


@dataclass(frozen=True)
class ArchitectureTask:
    """One task predicted, and predicted from the linear layers of its model alone."""

    prediction: TaskPrediction
    linears_ms: Array

    @property
    def kind(self) -> str:
        """Of the architecture."""
        found = architecture_of(self.prediction.task.rows)
        return DLRM if found is None else found.kind

    @property
    def pair(self) -> Pair:
        """Measured and predicted."""
        return self.prediction.measured_ms, self.prediction.predicted_ms


def validate_architectures(folder: Path) -> Report:
    """Predict and score every plan of every task set in a folder.

    Raises:
        InputError: there is no task set, or a file of one is broken or of another machine.
    """
    found = load_quiet(folder, "architectures", BESIDE, FEWEST_ROUNDS)
    tasks = [_predict(batch, task) for batch, task in found.tasks]
    return Report(
        NAME,
        tuple(
            replace(
                row, family=t.kind, part=SEEN if t.prediction.batch.name in LOOKED_AT else PLANS
            )
            for t in tasks
            for row in t.prediction.rows()
        ),
        headline=PLANS,
        held_out=(SEEN,),
        skipped=found.skipped,
        notes=(
            "measured: the median over all iterations of a plan on rank 0, in rounds in which "
            f"other work kept no more than {BESIDE:g} of a core busy; it had what the ranks left, "
            "which went first by their priority",
            f"'{PLANS}': models drawn, and predicted once, after the predictor was complete; ranks "
            f"that ran some of '{SEEN}' were profiled before (decision 0012)",
            "predicted from the calibration of the task set and from the dense part as it was "
            "captured, without using any iteration of a task; corrected for drift of the machine "
            "as in torchrec-cpu",
        ),
        scores=_scores(tasks, found.batches),
    )


def _predict(batch: TaskSet, task: MeasuredTask) -> ArchitectureTask:
    ratios = drift_ratios(task_reference(task.rows), batch.reference_ms)
    hardware = correct_drift(batch.made.profile, ratios)
    plans = [task.plans[name] for name in task.rows.names]
    known = linears_alone(task.workload, task.rows.model.get("linears", ()))
    return ArchitectureTask(
        predict_task(batch, task), FULL.times(known, batch.ranks, hardware, plans)
    )


def linears_alone(workload: Workload, linears: Sequence[Sequence[int]]) -> Workload:
    """The model as if its dense part were linear layers, each run once for a sample.

    That was all that was known of a module before its ops were captured (decision 0011).

    Args:
        linears: (in, out) of every layer; a DLRM, whose layers are known, needs none.
    """
    dense = workload.dense
    if not isinstance(dense, CapturedDense):
        return workload
    layers = tuple((width, out) for width, out in linears)
    known = DenseArch(
        dense.in_features, (), (), "concat", optimizer=dense.optimizer, linears=layers
    )
    return replace(workload, dense=known)


def _scores(tasks: Sequence[ArchitectureTask], batches: Sequence[TaskSet]) -> tuple[Scores, ...]:
    predictions = [task.prediction for task in tasks]
    return (
        _by_kind(tasks),
        _ablation(tasks),
        ranking(predictions),
        picking(predictions),
        intervals(predictions),
        truth(predictions),
        held_out(batches),
        by_task(predictions),
    )


def _by_kind(tasks: Sequence[ArchitectureTask]) -> Scores:
    """Errors of all plans, and by architecture; by the linear layers alone as well."""
    kinds = {"all": list(tasks)} | {
        kind: [t for t in tasks if t.kind == kind]
        for kind in dict.fromkeys(task.kind for task in tasks)
    }
    columns = (
        *(("architecture", "text"), ("tasks", "count"), ("plans", "count"), ("mean", "share")),
        *(("geomean", "share"), ("bias", "signed"), ("shape error", "share")),
        (LINEARS, "share"),
    )
    rows = tuple(_kind_row(kind, of) for kind, of in kinds.items())
    about = (
        "Predicted / measured - 1 of single plans; bias is the mean with its sign; shape error: "
        "once each task's median ratio is divided out. The last column is the mean error where "
        f"only the {LINEARS} are known."
    )
    return Scores("architectures", columns, rows, about)


def _kind_row(kind: str, tasks: Sequence[ArchitectureTask]) -> tuple[Cell, ...]:
    errors = join_arrays([relative_errors(*task.pair) for task in tasks])
    shapes = join_arrays([shape_errors(*task.pair) for task in tasks])
    alone = join_arrays([relative_errors(t.prediction.measured_ms, t.linears_ms) for t in tasks])
    bias = float(errors.mean()) if errors.size else None
    figures = (mape(errors), geomean(errors), bias, mape(shapes), mape(alone))
    return (kind, len(tasks), len(errors), *figures)


def _ablation(tasks: Sequence[ArchitectureTask]) -> Scores:
    """What capturing the dense part is worth."""
    known: dict[str, Callable[[ArchitectureTask], Array]] = {
        "everything": lambda task: task.prediction.predicted_ms,
        LINEARS: lambda task: task.linears_ms,
    }
    rows = []
    for name, of in known.items():
        pairs = [(task.prediction.measured_ms, of(task)) for task in tasks]
        rows.append((name, *order_row(name, pairs)[3:6], within(pairs)))
    columns = (
        *(("predictor", "text"), ("error", "share"), ("shape error", "share")),
        *(("Spearman median", "figure"), ("within 5 %", "share")),
    )
    return Scores("ablations", columns, tuple(rows), "The dense part known as its ops, or less.")
