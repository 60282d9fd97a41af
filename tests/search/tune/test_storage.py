"""Storage of studies, and messages about storages that fail."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import optuna
import pytest

from predictor.errors import InputError
from search.tune.storage import open_storage, storage_errors


@pytest.mark.parametrize("where", ["journal:{}/a", "{}/a.journal", "{}/a.log", "sqlite:///{}/a.db"])
def test_a_study_is_found_again(where: str, tmp_path: Path) -> None:
    for _ in range(2):
        storage = open_storage(where.format(tmp_path)).storage
        study = optuna.create_study(storage=storage, study_name="s", load_if_exists=True)
        study.optimize(lambda trial: trial.suggest_int("x", 0, 9), n_trials=1)
    assert len(study.get_trials()) == 2


def test_a_database_has_a_heartbeat_and_retries(tmp_path: Path) -> None:
    storage = open_storage(f"sqlite:///{tmp_path}/a.db").storage
    assert isinstance(storage, optuna.storages.RDBStorage)
    assert storage.get_heartbeat_interval()
    assert storage.get_heartbeat_stale_trial_callback()


def test_errors_of_a_database_are_one_line_with_what_to_try() -> None:
    from sqlalchemy.exc import OperationalError

    with pytest.raises(InputError) as error, storage_errors("postgresql://me@db/x"):
        raise OperationalError("SELECT 1", {}, Exception("no route to host\n\tIs it running?"))
    assert "postgresql://me@db/x" in str(error.value)
    assert "no route to host" in str(error.value)
    assert "\n" not in str(error.value)
    with (
        pytest.raises(InputError, match=r"psycopg2.*shardopt\[tune\]"),
        storage_errors("postgresql://me@db/x"),
    ):
        raise ModuleNotFoundError("No module named 'psycopg2'", name="psycopg2")


def test_a_damaged_attribute_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    shared = open_storage(f"sqlite:///{path}")
    study = optuna.create_study(storage=shared.storage, study_name="s")
    study.optimize(lambda trial: trial.set_user_attr("x", "y") or 0.0, n_trials=1)
    with sqlite3.connect(path) as database:
        database.execute("UPDATE trial_user_attributes SET value_json = '{'")
    shared = open_storage(f"sqlite:///{path}")
    again = optuna.load_study(storage=shared.storage, study_name="s")
    with pytest.raises(InputError, match="damaged"), storage_errors(shared.name):
        again.get_trials()


def test_what_a_killed_worker_left_of_a_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    for torn in ("", '{"op_code": 4, "wor'):
        with path.open("a") as file:
            file.write(torn)
        storage = open_storage(str(path)).storage
        study = optuna.create_study(storage=storage, study_name="s", load_if_exists=True)
        study.optimize(lambda trial: trial.suggest_int("x", 0, 9), n_trials=1)
    assert len(study.get_trials()) == 2


@pytest.mark.parametrize("content", ["no newline", "{]\n", '{"op_code": 0}\n'])
def test_another_file_is_no_journal_and_stays_as_it_is(content: str, tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text(content)
    with pytest.raises(InputError, match="not an Optuna journal"):
        open_storage(str(path))
    assert path.read_text() == content
