"""Models of several architectures run for real by TorchRec on CPU ranks, against predictions.

Their dense parts are captured from the modules that ran (`lab.rankers`); constants come from the
calibration before the tasks. A second prediction knows only the linear layers of the dense part,
each once a sample.

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
"""Task sets whose profiles of ranks were used to improve the predictor (decision 0012)."""
DLRM = "dlrm"
BESIDE = 0.7
"""Cores that other work may keep busy in a round that counts. The committed rounds shared their
machine with work of lower priority, which ran while the ranks waited for each other."""
FEWEST_ROUNDS = 3
"""Least number of rounds of a task; the median of fewer is too uncertain."""
LINEARS = "linear layers once a sample"


def validate_architectures(folder: Path) -> Report:
    """Predict and score every plan of every task set in a folder.

    Raises:
        InputError: there is no task set, or a file of one is broken or of another machine.
    """
    batches, quiet, skipped = load_quiet(folder, "architectures", BESIDE, FEWEST_ROUNDS)
    tasks = [_predict(whole.batch, task) for whole, task in quiet]
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
    reduce = partial(linears_alone, linears=task.rows.model.get("linears", ()))
    return predict_task(batch, task, [Ablation(LINEARS, workload=reduce)])


def _kind(task: TaskPrediction) -> str:
    architecture = architecture_of(task.task.rows)
    return DLRM if architecture is None else architecture.kind


def linears_alone(workload: Workload, linears: Sequence[Sequence[int]]) -> Workload:
    """Replace the model's dense part by linear layers, each run once for a sample.

    Before ops were captured, nothing else of a module was known (decision 0011).

    Args:
        linears: (in, out) of every layer; a DLRM needs none.
    """
    dense = workload.dense
    if not isinstance(dense, CapturedDense):
        return workload
    layers = tuple((width, out) for width, out in linears)
    dense_part = DenseArch(
        dense.in_features, (), (), "concat", optimizer=dense.optimizer, linears=layers
    )
    return replace(workload, dense=dense_part)


def _kind_line(kind: str, tasks: Sequence[TaskPrediction]) -> Line:
    """Return the errors of all plans of an architecture, also by the linear layers alone."""
    pairs = predicted_pairs(tasks)
    errors = join_arrays([relative_errors(*pair) for pair in pairs])
    shapes = join_arrays([shape_errors(*pair) for pair in pairs])
    alone = join_arrays([relative_errors(t.measured_ms, t.ablated_ms[LINEARS]) for t in tasks])
    bias = float(errors.mean()) if errors.size else None
    figures = (mape(errors), geomean(errors), bias, mape(shapes), mape(alone))
    return (kind, len(tasks), len(errors), *figures)
