"""Several workers on one study: one is killed in the middle of a trial, nothing is lost."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from tests.search.tune import postgres
from tests.search.tune.worker import a_tuning

REPOSITORY = Path(__file__).parents[3]
TRIALS = 8


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    """URL of a database on a server of our own."""
    with postgres.server() as url:
        yield url


def start(storage: str, study: str, hangs_at: int) -> subprocess.Popen[str]:
    worker = [sys.executable, "-m", "tests.search.tune.worker"]
    return subprocess.Popen(
        [*worker, storage, study, str(TRIALS), str(hangs_at)],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def one_is_killed(storage: str) -> None:
    """Two workers begin together; one dies in its second trial, the other completes the study."""
    survivor, victim = start(storage, "s", -1), start(storage, "s", 1)
    try:
        assert victim.stdout is not None
        assert victim.stdout.readline() == "hangs\n", victim.communicate()[1]
        before = a_tuning(storage, "s", TRIALS).study.get_trials()
        victim.send_signal(signal.SIGKILL)
        out, errors = survivor.communicate(timeout=60)
        assert (survivor.returncode, out.strip()) == (0, "trials"), errors
    finally:
        for worker in (survivor, victim):
            worker.kill()
            worker.communicate()
    after = a_tuning(storage, "s", TRIALS).study.get_trials()
    check_nothing_lost(before, after)
    check_retried(after)


def check_nothing_lost(
    before: list[optuna.trial.FrozenTrial], after: list[optuna.trial.FrozenTrial]
) -> None:
    done = [t for t in before if t.state in (TrialState.COMPLETE, TrialState.PRUNED)]
    assert done  # the victim's first trial, at least
    for trial in done:
        again = after[trial.number]
        assert (again.state, again.params, again.values) == (
            trial.state,
            trial.params,
            trial.values,
        )
        assert again.user_attrs == trial.user_attrs
    finished = [t for t in after if t.state in (TrialState.COMPLETE, TrialState.PRUNED)]
    assert len(finished) == TRIALS
    assert len({tuple(sorted(t.params.items())) for t in finished}) == TRIALS
    assert all(t.state.is_finished() for t in after)


def check_retried(after: list[optuna.trial.FrozenTrial]) -> None:
    """Of the trials that failed, one was broken off by the kill; it was run again."""
    again = [t for t in after if "failed_trial" in t.system_attrs]
    assert len(again) == 1
    stale = after[again[0].system_attrs["failed_trial"]]
    assert stale.state is TrialState.FAIL
    assert again[0].state in (TrialState.COMPLETE, TrialState.PRUNED)
    assert again[0].params == stale.params
    assert stale.user_attrs["worker"] != again[0].user_attrs["worker"]


@pytest.mark.slow
def test_a_killed_worker_on_a_journal(tmp_path: Path) -> None:
    one_is_killed(f"journal:{tmp_path / 'study'}")


@pytest.mark.slow
def test_a_killed_worker_on_postgresql(database: str) -> None:
    one_is_killed(database)


@pytest.mark.slow
def test_any_worker_can_read_the_best_plan(database: str) -> None:
    """And a study that has all of its trials is not searched again."""
    ours = a_tuning(database, "best", 3)
    found = ours.run()
    theirs = a_tuning(database, "best", 3).run()
    assert found.best == theirs.best
    assert found.best.plan is not None
    assert [t.number for t in theirs.trials] == [t.number for t in found.trials]
