"""Several workers on one study: one is killed in the middle of a trial, nothing is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from tests.search.tune.worker import a_tuning

REPOSITORY = Path(__file__).parents[3]
TRIALS = 8


def start(storage: str, study: str, hangs_at: int, trials: int = TRIALS) -> subprocess.Popen[str]:
    worker = [sys.executable, "-m", "tests.search.tune.worker"]
    return subprocess.Popen(
        [*worker, storage, study, str(trials), str(hangs_at)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def one_is_killed(storage: str) -> list[optuna.trial.FrozenTrial]:
    """Two workers begin together; one dies in its second trial, the other completes the study."""
    survivor, victim = start(storage, "s", -1), start(storage, "s", 1)
    try:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "hangs\n", victim.communicate()[1]
        before = a_tuning(storage, "s", TRIALS).study.get_trials()
        victim.send_signal(signal.SIGKILL)
        out, errors = survivor.communicate(timeout=240)
        assert (survivor.returncode, out.strip()) == (0, "trials"), errors
    finally:
        for worker in (survivor, victim):
            worker.kill()
            worker.communicate()
    after = a_tuning(storage, "s", TRIALS).study.get_trials()
    check_nothing_lost(before, after)
    return after


def check_nothing_lost(
    before: list[optuna.trial.FrozenTrial], after: list[optuna.trial.FrozenTrial]
) -> None:
    done = [t for t in before if t.state in (TrialState.COMPLETE, TrialState.PRUNED)]
    assert done  # the victim's first trial, at least
    for trial in done:
        again = after[trial.number]
        assert (again.state, again.params, again.values, again.user_attrs) == (
            *(trial.state, trial.params, trial.values, trial.user_attrs),
        )
    finished = [t for t in after if t.state in (TrialState.COMPLETE, TrialState.PRUNED)]
    # two that ask at the same moment may be given the same setting, or run one more than asked for
    assert len({tuple(sorted(t.params.items())) for t in finished}) in (TRIALS, TRIALS + 1)


@pytest.mark.slow
def test_a_killed_worker_on_a_journal(tmp_path: Path) -> None:
    """Its trial stays open; the same command goes on with other settings."""
    after = one_is_killed(f"journal:{tmp_path / 'study'}")
    assert sum(t.state is TrialState.RUNNING for t in after) == 1


@pytest.mark.slow
def test_a_killed_worker_on_a_database(tmp_path: Path) -> None:
    """Once its heartbeat has stopped, Optuna fails its trial and queues the setting again."""
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    after = one_is_killed(storage)
    if not any("failed_trial" in t.system_attrs for t in after):
        # the other was done before the heartbeat was missed for long enough
        time.sleep(4)  # longer than the worker's grace
        another = start(storage, "s", -1, TRIALS + 1)
        _, errors = another.communicate(timeout=240)
        assert another.returncode == 0, errors
        after = a_tuning(storage, "s", TRIALS + 1).study.get_trials()
    (again,) = (t for t in after if "failed_trial" in t.system_attrs)
    stale = after[again.system_attrs["failed_trial"]]
    assert stale.state is TrialState.FAIL
    assert again.params == stale.params
    assert again.state in (TrialState.COMPLETE, TrialState.PRUNED)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["best.journal", "sqlite"])
def test_any_worker_can_read_the_best_plan(tmp_path: Path, where: str) -> None:
    """And a study that has all of its trials is not searched again."""
    storage = f"sqlite:///{tmp_path}/s.db" if where == "sqlite" else str(tmp_path / where)
    first = a_tuning(storage, "best", 3).run()
    second = a_tuning(storage, "best", 3).run()
    assert first.best == second.best
    assert first.best.plan is not None
    assert [t.number for t in second.trials] == [t.number for t in first.trials]
