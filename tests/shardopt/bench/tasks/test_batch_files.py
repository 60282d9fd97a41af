"""Names that the writer of a batch and its reader share."""

import subprocess
import sys

from shardopt.bench.tasks.batch_files import task_name

HEAVY = ("torch", "numpy", "scipy", "predictor", "search", "rich", "typer")


def test_names_sort_as_their_seeds() -> None:
    assert task_name(7) == "task-007"
    seeds = [0, 7, 10, 99, 100, 999]
    names = [task_name(seed) for seed in seeds]
    assert sorted(names) == names


def test_nothing_heavy_is_imported_for_them() -> None:
    code = (
        "import sys; import shardopt.bench.tasks.batch_files as files; "
        f"print(files.BATCH_FILE, *[name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["batch.json"]
