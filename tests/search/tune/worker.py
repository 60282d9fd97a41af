"""A worker of a study, run in a process of its own by `test_workers`.

    python -m tests.search.tune.worker STORAGE STUDY TRIALS HANGS_AT

The worker hangs in its trial number HANGS_AT (of those it runs, from 0), for the test to kill it.
Databases have a heartbeat every second.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from search.tune import storage as module
from search.tune import tune
from search.tune.goals import GOALS
from search.tune.knobs import Case, grid_of
from search.tune.storage import open_storage
from search.tune.study import new_study
from search.tune.tune import Budget, Tuning
from tests.search.problems import H100, a_table, a_workload, hosts


def a_case() -> Case:
    """Two tables on two ranks."""
    workload = a_workload(a_table("t0", alpha=1.05), a_table("t1", 3000, 32))
    return Case(workload, hosts(2), H100)


def a_tuning(storage: str, study: str, trials: int) -> Tuning:
    """The study that all workers of a test share."""
    case, goals = a_case(), [GOALS["time"]]
    grid = grid_of(case, {"batch_size": None, "qcomm": None, "pipeline": ("base", "sparse_dist")})
    shared = open_storage(storage)
    shared_study = new_study(grid, goals, 0, {}, name=study, shared=shared)
    return Tuning(case, grid, goals, Budget(trials, effort=0.002), shared_study, shared)


def main() -> None:
    storage, study, trials, hangs_at = sys.argv[1:]
    module.HEARTBEAT_S, module.STALE_S = 1, 3
    real, count = tune.try_setting, 0

    def hanging(*arguments: Any) -> Any:
        nonlocal count
        if count == int(hangs_at):
            print("hangs", flush=True)
            time.sleep(600)
        count += 1
        return real(*arguments)

    tune.try_setting = hanging
    print(a_tuning(storage, study, int(trials)).run().stopped_by, flush=True)


if __name__ == "__main__":
    main()
