"""Leases, retries and failures of storages; databases too, with SQLite in the place of a server."""

from __future__ import annotations

import time
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState
from sqlalchemy.exc import OperationalError

from predictor.errors import InputError
from search.tune.storage import (
    LEASE,
    MAX_RETRIES,
    WORKER,
    Liveness,
    SharedStorage,
    open_storage,
    storage_errors,
)

QUICK = Liveness(every_s=1, stale_s=2)
PATIENT = Liveness(every_s=1, stale_s=6)
"""A worker may be five seconds late on a busy machine."""
LONGEST_S = 60.0
NEVER = Liveness(every_s=1, stale_s=600)


def a_study(shared: SharedStorage) -> optuna.Study:
    return optuna.create_study(storage=shared.storage, study_name="s", load_if_exists=True)


def states(study: optuna.Study) -> list[str]:
    return [trial.state.name for trial in study.get_trials()]


@pytest.fixture(params=["a.journal", "sqlite"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A journal and a database."""
    return f"sqlite:///{tmp_path}/a.db" if request.param == "sqlite" else f"{tmp_path}/a.journal"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Heartbeat of storage")
def test_a_trial_is_alive_as_long_as_its_worker(where: str) -> None:
    ours, theirs = open_storage(where, PATIENT), open_storage(where, PATIENT)
    study, seen = a_study(ours), a_study(theirs)
    trial = study.ask({"x": optuna.distributions.IntDistribution(0, 9)})
    with ours.alive(trial):
        time.sleep(PATIENT.stale_s + 1)  # a lease that runs out
        theirs.retry_stale(seen)
        assert states(seen) == ["RUNNING"]
    deadline = time.monotonic() + LONGEST_S
    while states(seen) == ["RUNNING"] and time.monotonic() < deadline:
        time.sleep(0.2)
        theirs.retry_stale(seen)
    theirs.retry_stale(seen)
    assert states(seen) == ["FAIL", "WAITING"]
    again = study.ask({"x": optuna.distributions.IntDistribution(0, 9)})
    assert (again.number, again.params) == (1, trial.params)
    assert again.user_attrs == {}


def test_a_lease_that_ran_out_is_retried_so_often(tmp_path: Path) -> None:
    shared = open_storage(f"{tmp_path}/a.log", NEVER)
    study = a_study(shared)
    for _ in range(MAX_RETRIES + 1):
        trial = study.ask()
        trial.set_user_attr(LEASE, time.time() + 600)
        shared.retry_stale(study)
        assert states(study)[-1] == "RUNNING"
        trial.set_user_attr(LEASE, time.time() - 1)
        shared.retry_stale(study)
    assert states(study) == ["FAIL"] * (MAX_RETRIES + 1)


@pytest.mark.filterwarnings("ignore:Heartbeat of storage")
def test_a_trial_that_died_before_its_first_sign_of_life(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, now = open_storage(where, QUICK), [0.0]
    monkeypatch.setattr("search.tune.storage.time.monotonic", lambda: now[0])
    study = a_study(shared)
    study.ask()
    shared.retry_stale(study)
    now[0] = QUICK.stale_s - 0.1
    shared.retry_stale(study)
    assert states(study) == ["RUNNING"]
    now[0] = QUICK.stale_s + 0.1
    shared.retry_stale(study)
    assert states(study) == ["FAIL", "WAITING"]


def test_two_workers_retry_a_trial_once(tmp_path: Path) -> None:
    one, two = (open_storage(f"{tmp_path}/a.journal", QUICK) for _ in range(2))
    study, other = a_study(one), a_study(two)
    study.ask()
    stale = other.get_trials()[0]
    one.retry(study, stale)
    two.retry(other, stale)
    assert states(study) == ["FAIL", "WAITING"]


def test_a_running_trial_says_who_runs_it(tmp_path: Path) -> None:
    shared = open_storage(f"journal:{tmp_path}/a", QUICK)
    study = a_study(shared)
    trial = study.ask()
    with shared.alive(trial):
        attributes = study.get_trials()[0].user_attrs
    assert attributes[WORKER]
    assert attributes[LEASE] <= time.time() + QUICK.stale_s
    assert study.get_trials()[0].state is TrialState.RUNNING


def test_errors_of_a_database_are_one_line_with_what_to_try() -> None:
    with pytest.raises(InputError) as error, storage_errors("postgresql://me@db/x"):
        raise OperationalError("SELECT 1", {}, Exception("no route to host\n\tIs it running?"))
    assert str(error.value).startswith(
        "postgresql://me@db/x: the storage cannot be used: no route to host; finished trials"
    )
    with (
        pytest.raises(InputError, match=r"driver .* not installed \(psycopg2\).*shardopt\[tune\]"),
        storage_errors("postgresql://me@db/x"),
    ):
        raise ModuleNotFoundError("No module named 'psycopg2'", name="psycopg2")
