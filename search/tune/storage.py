"""Storage of a study through Optuna: a database or a journal file.

Optuna itself finds trials whose worker died: a database keeps a heartbeat of every running trial,
and one that stops is failed and queued again. Journals have none.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import BaseStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock, JournalStorage
from sqlalchemy.engine import make_url
from sqlalchemy.exc import (
    ArgumentError,
    IntegrityError,
    NoSuchModuleError,
    OperationalError,
    ProgrammingError,
    SQLAlchemyError,
)

from predictor.errors import InputError

JOURNAL = "journal:"
JOURNAL_SUFFIXES = (".journal", ".log")
FORMS = (
    "a database such as postgresql://user@host/name or sqlite:///tune.db, or a journal file: "
    "journal:PATH, or a path that ends in .journal or .log"
)
HEARTBEAT_S = 15
STALE_S = 60
"""A trial in a database without a heartbeat for so long is failed and tried again."""
MAX_RETRIES = 3
"""A trial that ends its worker so often is not tried again."""
LOCK_SECONDS = 10
"""A journal's lock that is held longer was left by a worker that died."""
OPENINGS = 5
"""Attempts to set up a database; two workers that start at once make the same tables."""


class SharedStorage(NamedTuple):
    """A storage that several processes use, and its name without password."""

    storage: BaseStorage
    name: str


class _Database(RDBStorage):
    """A heartbeat that fails is one missed; that the server is gone is seen elsewhere."""

    def record_heartbeat(self, trial_id: int) -> None:
        with suppress(Exception):
            super().record_heartbeat(trial_id)


def open_storage(where: str) -> SharedStorage:
    """The storage at an address.

    Raises:
        InputError: it is neither a database nor a journal, or cannot be reached or written.
    """
    path = where.removeprefix(JOURNAL)
    if path == where and "://" in where:
        return _open_database(where)
    if (path == where and not where.endswith(JOURNAL_SUFFIXES)) or not path:
        raise InputError(f"the storage is '{where}'; give {FORMS}", ("storage",))
    with storage_errors(path):
        # a file that cannot be written is found out before any trial is run
        with open(path, "ab"):
            pass
        lock = JournalFileSymlinkLock(path, grace_period=LOCK_SECONDS)
        try:
            storage = JournalStorage(JournalFileBackend(path, lock_obj=lock))
            lock.acquire()
            try:
                _drop_torn_line(path)
            finally:
                lock.release()
        except (ValueError, LookupError, TypeError, AttributeError, AssertionError):
            raise InputError(f"{path}: is not an Optuna journal; choose another file") from None
        return SharedStorage(storage, path)


def _drop_torn_line(path: str) -> None:
    """Cut off the half of a line that a killed worker left, or the next line would go on from it.

    Raises:
        ValueError: no whole line is before it, or the last whole one is no JSON.
    """
    with open(path, "rb+") as file:
        content = file.read()
        whole, newline, torn = content.rpartition(b"\n")
        if content:
            json.loads(whole.rpartition(b"\n")[2])
        if torn:
            file.truncate(len(whole + newline))


def _open_database(url: str) -> SharedStorage:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise InputError(f"the storage is not a database URL; give {FORMS}", ("storage",)) from None
    name = parsed.render_as_string(hide_password=True)

    def connect() -> SharedStorage:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)  # heartbeats are
            storage = _Database(
                url,
                engine_kwargs={"pool_pre_ping": True},
                heartbeat_interval=HEARTBEAT_S,
                grace_period=STALE_S,
                heartbeat_stale_trial_callback=RetryHeartbeatStaleTrialCallback(MAX_RETRIES),
            )
        return SharedStorage(storage, name)

    with storage_errors(name):
        for _ in range(OPENINGS - 1):
            try:
                return connect()
            except NoSuchModuleError:
                raise InputError(
                    f"{name}: '{parsed.drivername}' is not a kind of database; give {FORMS}"
                ) from None
            except (IntegrityError, OperationalError, ProgrammingError) as error:
                # another worker makes the tables at the same time; what is refused stays so
                if isinstance(error, OperationalError) and "already exists" not in str(error):
                    raise
                time.sleep(0.2)
        return connect()


@contextmanager
def storage_errors(name: str) -> Iterator[None]:
    """Turn failures of a storage into errors that say which, why and what to try."""
    try:
        yield
    except ImportError as error:
        module = error.name or str(error)
        raise InputError(
            f"{name}: the driver of this database is not installed ({module}); for PostgreSQL: "
            "pip install 'shardopt[tune]'"
        ) from None
    except json.JSONDecodeError as error:
        raise InputError(
            f"{name}: the storage is damaged: its data of a study is not JSON ({error}); "
            "choose another storage"
        ) from None
    except (SQLAlchemyError, StorageInternalError, OSError) as error:
        # the first line of what the database or the system says
        cause = error.__cause__ if isinstance(error, StorageInternalError) else error
        original = getattr(cause, "orig", None) or cause or error
        message = getattr(original, "strerror", None) or str(original)
        reason = message.strip().split("\n")[0].rstrip(".") or type(error).__name__
        raise InputError(
            f"{name}: the storage cannot be used: {reason}; finished trials are kept. "
            "Check the address and that the server runs, then give the same command again"
        ) from None
