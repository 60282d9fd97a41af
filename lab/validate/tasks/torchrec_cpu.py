"""Plans run for real by TorchRec on CPU ranks, against predictions from calibration alone.

Every batch (`lab.tasks.task_set`) brings the calibration made before its tasks;
nothing is fitted on an iteration. Batches that the predictor was not developed on lead. Reference
kernels, which run between the plans, correct for drift of the machine; figures without that
correction are shown as well.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lab.tasks.task_set import load_task_sets
from lab.validate.report import Report
from lab.validate.tasks.tables import all_scores
from lab.validate.tasks.task_prediction import DEVELOPED_ON, predict_task

NAME = "torchrec-cpu"
FRESH, DEVELOPED = "batches fresh", "batches developed on"
ALL = "all plans"
UNCORRECTED = f"{FRESH}, not corrected for drift"
VARIANTS_TRIED = 21
"""Versions of the predictor that were scored on `DEVELOPED_ON` before the one reported."""


def validate_torchrec_cpu(folder: Path) -> Report:
    """Predict and score every plan of every batch in a folder.

    Raises:
        InputError: there is no batch, or a file of one is broken or of another machine.
    """
    batches = load_task_sets(
        folder,
        "a folder whose sub-folders hold batch.json, calibration.rows.csv and the tasks' rows",
    )
    tasks = [predict_task(batch, task) for batch in batches for task in batch.tasks]
    rows = tuple(
        replace(row, part=FRESH if task.fresh else DEVELOPED)
        for task in tasks
        for row in task.rows()
    )
    raw = [
        replace(row, predicted_ms=float(row.name["uncorrected_ms"]), interval_ms=None)
        for row in rows
        if row.part == FRESH
    ]
    return Report(
        NAME,
        rows,
        headline=FRESH,
        held_out=(DEVELOPED,),
        parts={ALL: rows} | ({UNCORRECTED: raw} if raw else {}),
        skipped=tuple(text for batch in batches for text in batch.skipped),
        notes=(
            "measured: the median over all iterations of a plan on rank 0",
            "predicted from the calibration of the batch, without using any iteration of a task, "
            "and corrected for drift: every constant is scaled by what reference kernels took "
            f"while the task ran, over what they took at calibration; '{UNCORRECTED}' is without",
            f"{VARIANTS_TRIED} versions of the predictor were tried before this one, most of them "
            f"on {DEVELOPED_ON[0]}; fresh batches were scored with this one only",
        ),
        scores=all_scores(tasks, batches),
    )
