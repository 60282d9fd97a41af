"""Names of what a batch's folder holds, for those that write it and those that read it."""

from __future__ import annotations

SCHEMA = "shardopt.lab-batch/1"
"""Of the batch file."""
BATCH_FILE = "batch.json"
CALIBRATION_FILE = "calibration.rows.csv"


def task_name(seed: int) -> str:
    """``task-007``, as the files of a task are called."""
    return f"task-{seed:03d}"
