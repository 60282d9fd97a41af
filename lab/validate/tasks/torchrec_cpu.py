"""Plans run for real by TorchRec on CPU ranks, against predictions from calibration alone.

Every batch (`lab.tasks.task_set`) has the calibration made before its tasks; nothing is fitted on
an iteration. Batches that the predictor was not developed on come first. Reference kernels between
the plans correct for drift of the machine; figures without that correction are shown as well.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lab.suites import SUITES, Report
from lab.tasks.task_set import load_task_sets
from lab.validate.tasks.ablations import ABLATIONS
from lab.validate.tasks.tables import (
    ablation_lines,
    absolute,
    over_balanced,
    shared_tables,
    synchronisation,
)
from lab.validate.tasks.task_prediction import predict_task

FRESH, DEVELOPED = "batches fresh", "batches developed on"
ALL = "all plans"
UNCORRECTED = f"{FRESH}, not corrected for drift"


def validate_torchrec_cpu(folder: Path) -> Report:
    """Predict and score every plan of every batch in a folder.

    Raises:
        InputError: there is no batch, or a file of one is broken or of another machine.
    """
    batches = load_task_sets(
        folder,
        "a folder whose sub-folders hold batch.json, calibration.rows.csv and the tasks' rows",
    )
    tasks = [predict_task(batch, task, ABLATIONS) for batch in batches for task in batch.tasks]
    rows = [
        replace(row, part=FRESH if task.fresh else DEVELOPED)
        for task in tasks
        for row in task.rows()
    ]
    raw = [
        replace(row, predicted_ms=float(row.name["uncorrected_ms"]), interval_ms=None)
        for row in rows
        if row.part == FRESH
    ]
    suite = SUITES["torchrec-cpu"]
    shared = shared_tables(suite, tasks, batches)
    return suite.report(
        rows,
        [text for batch in batches for text in batch.skipped],
        parts={ALL: rows} | ({UNCORRECTED: raw} if raw else {}),
        scores=(
            suite.table("absolute error", absolute(tasks)),
            *(shared[name] for name in ("ranking", "picking")),
            *(shared[name] for name in ("90 % intervals", "truth against truth")),
            suite.table("ablations", ablation_lines(tasks)),
            suite.table("synchronisation", synchronisation(tasks)),
            suite.table("plans over the balanced one", over_balanced(tasks)),
            *(shared[name] for name in ("held-out kernels", "tasks")),
        ),
    )
