"""Models of several architectures run for real by TorchRec on CPU ranks, against predictions.

Their dense parts are captured from the modules that ran (`lab.rankers`);
constants are those of the calibration made before the tasks. Beside the prediction stands what the
same dense part is predicted to take if only its linear layers are known, each once a sample.

Why: docs/decisions/0012-dense-parts-tested-by-running.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from lab.architecture import architecture_of
from lab.statistics import geomean, grouped, relative_errors, shape_errors
from lab.suites import SUITES, Report
from lab.tasks.task_set import MeasuredTask, TaskSet
from lab.validate.tasks.ablations import Ablation
from lab.validate.tasks.gains import load_quiet
from lab.validate.tasks.tables import (
    Line,
    ablation_lines,
    join_arrays,
    predicted_pairs,
    shared_tables,
)
from lab.validate.tasks.task_prediction import TaskPrediction, predict_task
from predictor.model.captured import CapturedDense
from predictor.model.workload import DenseArch, Workload
from shardopt.calibrate.fitting import mape

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


def validate_architectures(folder: Path) -> Report:
    """Predict and score every plan of every task set in a folder.

    Raises:
        InputError: there is no task set, or a file of one is broken or of another machine.
    """
    batches, quiet, skipped = load_quiet(folder, "architectures", BESIDE, FEWEST_ROUNDS)
    tasks = [_predict(of.batch, task) for of, task in quiet]
    kinds = {"all": tasks, **grouped(tasks, _kind)}
    rows = [
        replace(row, family=_kind(task), part=SEEN if task.batch.name in LOOKED_AT else PLANS)
        for task in tasks
        for row in task.rows()
    ]
    suite = SUITES["architectures"]
    shared = shared_tables(suite, tasks, batches)
    return suite.report(
        rows,
        skipped,
        scores=(
            suite.table("architectures", [_kind_line(*item) for item in kinds.items()]),
            suite.table("ablations", ablation_lines(tasks)),
            *shared.values(),
        ),
        beside=BESIDE,
    )


def _predict(batch: TaskSet, task: MeasuredTask) -> TaskPrediction:
    known = partial(linears_alone, linears=task.rows.model.get("linears", ()))
    return predict_task(batch, task, [Ablation(LINEARS, workload=known)])


def _kind(task: TaskPrediction) -> str:
    found = architecture_of(task.task.rows)
    return DLRM if found is None else found.kind


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


def _kind_line(kind: str, tasks: Sequence[TaskPrediction]) -> Line:
    """Errors of all plans of an architecture; by the linear layers alone as well."""
    pairs = predicted_pairs(tasks)
    errors = join_arrays([relative_errors(*pair) for pair in pairs])
    shapes = join_arrays([shape_errors(*pair) for pair in pairs])
    alone = join_arrays([relative_errors(t.measured_ms, t.ablated_ms[LINEARS]) for t in tasks])
    bias = float(errors.mean()) if errors.size else None
    figures = (mape(errors), geomean(errors), bias, mape(shapes), mape(alone))
    return (kind, len(tasks), len(errors), *figures)
