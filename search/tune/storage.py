"""Where a study lives, and how the trials of workers that died are found and tried again.

A database keeps a heartbeat of every running trial (`optuna.storages.RDBStorage`). A journal file
has none, so a running trial carries a lease: an attribute with the time at which it ends, which a
thread of its worker renews. Before a worker asks for a trial, it fails those without a sign of life
and puts them in the queue again.
"""

from __future__ import annotations

import copy
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Thread
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError, UpdateFinishedTrialError
from optuna.storages import BaseStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock, JournalStorage
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy.engine import make_url
from sqlalchemy.exc import (
    ArgumentError,
    IntegrityError,
    NoSuchModuleError,
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
POSTGRESQL = ("postgresql", "postgres")
DRIVERS = ("psycopg2", "psycopg")
LEASE = "lease_until"
"""Attribute of a running trial on a journal: seconds since 1970, by the clock of its worker."""
WORKER = "worker"
"""Attribute of a running trial, set after its first sign of life: who runs it."""
MAX_RETRIES = 3
"""A trial that ends its worker so often is not tried again."""
CONNECT_SECONDS = 10
LOCK_SECONDS = 10
"""A journal's lock that is held longer was left by a worker that died."""
OPENINGS = 5
"""Attempts to set up a database; two workers that start at once make the same tables."""


@dataclass(frozen=True)
class Liveness:
    """How running trials show that their worker lives.

    Args:
        every_s: seconds between signs of life, whole and >= 1.
        stale_s: a trial without a sign for so long is failed and tried again, whole, > every_s.
    """

    every_s: int = 15
    stale_s: int = 60


@dataclass
class SharedStorage:
    """A storage that several processes use.

    Args:
        name: for messages, without password.
    """

    storage: BaseStorage
    name: str
    liveness: Liveness
    _unborn: dict[int, float] = field(default_factory=dict)

    @contextmanager
    def alive(self, trial: optuna.Trial) -> Iterator[None]:
        """Signs of life of a running trial while the block runs."""
        trial_id = trial._trial_id
        self._sign(trial_id)
        trial.set_user_attr(WORKER, f"{os.uname().nodename}:{os.getpid()}")
        ended = Event()

        def renew() -> None:
            while not ended.wait(self.liveness.every_s):
                # a sign that fails is one missed; that the storage is gone is seen elsewhere
                with suppress(Exception):
                    self._sign(trial_id)

        thread = Thread(target=renew, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _sign(self, trial_id: int) -> None:
        if isinstance(self.storage, RDBStorage):
            self.storage.record_heartbeat(trial_id)
        else:
            until = time.time() + self.liveness.stale_s
            self.storage.set_trial_user_attr(trial_id, LEASE, until)

    def retry_stale(self, study: optuna.Study) -> None:
        """Fail the trials without a sign of life and put them in the queue again."""
        with quiet():
            optuna.storages.fail_stale_trials(study)  # of a database
        for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if self._is_stale(trial):
                self.retry(study, trial)

    def _is_stale(self, trial: FrozenTrial) -> bool:
        """Its lease ran out; or it was never seen alive, for as long as this worker watches."""
        if LEASE in trial.user_attrs:
            return bool(time.time() > trial.user_attrs[LEASE])
        if WORKER in trial.user_attrs:
            return False
        first = self._unborn.setdefault(trial.number, time.monotonic())
        return time.monotonic() - first > self.liveness.stale_s

    def retry(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Fail a running trial and put it in the queue again, unless another worker just did."""
        with suppress(UpdateFinishedTrialError):
            if self.storage.set_trial_state_values(trial._trial_id, state=TrialState.FAIL):
                requeue(study, trial)


def requeue(study: optuna.Study, trial: FrozenTrial, *, blameless: bool = False) -> None:
    """Queue a failed trial again, without what its worker noted down.

    Args:
        blameless: the trial had no part in its end, which does not count against it.
    """
    again = copy.deepcopy(trial)
    again.user_attrs = {}
    if blameless:
        again.system_attrs = {}
    with quiet():
        RetryHeartbeatStaleTrialCallback(max_retry=MAX_RETRIES)(study, again)


@contextmanager
def quiet() -> Iterator[None]:
    """Without Optuna's remarks that heartbeats are experimental, or meant for its own loop."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        warnings.filterwarnings("ignore", message="Heartbeat of storage is supposed")
        yield


def open_storage(where: str, liveness: Liveness) -> SharedStorage:
    """The storage at an address.

    Raises:
        InputError: it is neither a database nor a journal, or cannot be reached or written.
    """
    if where.startswith(JOURNAL):
        return _open_journal(where.removeprefix(JOURNAL), liveness)
    if "://" in where:
        return _open_database(where, liveness)
    if where.endswith(JOURNAL_SUFFIXES):
        return _open_journal(where, liveness)
    raise InputError(f"the storage is '{where}'; give {FORMS}", ("storage",))


def _open_journal(path: str, liveness: Liveness) -> SharedStorage:
    if not path:
        raise InputError(f"the storage names no file; give {FORMS}", ("storage",))
    if Path(path).is_dir():
        raise InputError(f"{path}: is a directory; give the name of a journal file")
    if not Path(path).absolute().parent.is_dir():
        raise InputError(
            f"{path}: there is no directory {Path(path).parent}; create it or choose another file"
        )
    with storage_errors(path):
        # a file that cannot be written is found out before any trial is run
        with open(path, "ab"):
            pass
        lock = JournalFileSymlinkLock(path, grace_period=LOCK_SECONDS)
        try:
            storage = JournalStorage(JournalFileBackend(path, lock_obj=lock))
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError):
            raise InputError(f"{path}: is no Optuna journal; choose another file") from None
    return SharedStorage(storage, path, liveness)


def _open_database(url: str, liveness: Liveness) -> SharedStorage:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise InputError(
            f"the storage is no URL of a database; give {FORMS}", ("storage",)
        ) from None
    name = parsed.render_as_string(hide_password=True)
    if parsed.drivername in POSTGRESQL:
        # which driver SQLAlchemy takes by default depends on its version, not on what is there
        parsed = parsed.set(drivername=f"postgresql+{_driver()}")
    connect: dict[str, Any] = {}
    if parsed.get_backend_name() == "postgresql":
        connect = {"connect_args": {"connect_timeout": CONNECT_SECONDS}}

    def attempt() -> BaseStorage:
        with quiet():
            return RDBStorage(
                parsed.render_as_string(hide_password=False),
                engine_kwargs={"pool_pre_ping": True, **connect},
                heartbeat_interval=liveness.every_s,
                grace_period=liveness.stale_s,
                heartbeat_stale_trial_callback=requeue,
            )

    with storage_errors(name):
        try:
            return SharedStorage(_patiently(attempt), name, liveness)
        except NoSuchModuleError:
            raise InputError(
                f"{name}: '{parsed.drivername}' is no kind of database; give {FORMS}"
            ) from None


def _driver() -> str:
    """The PostgreSQL driver that is installed."""
    return next((name for name in DRIVERS if find_spec(name)), DRIVERS[0])


def _patiently(attempt: Callable[[], BaseStorage]) -> BaseStorage:
    """What another worker that creates the same tables makes fail succeeds a moment later."""
    for left in reversed(range(OPENINGS)):
        try:
            return attempt()
        except (IntegrityError, ProgrammingError):
            if not left:
                raise
            time.sleep(0.2)
    raise AssertionError


@contextmanager
def storage_errors(name: str) -> Iterator[None]:
    """Failures of a storage as errors that say which, why and what to try."""
    try:
        yield
    except ImportError as error:
        module = error.name or str(error)
        raise InputError(
            f"{name}: the driver of this database is not installed ({module}); for PostgreSQL: "
            "pip install 'shardopt[tune]'"
        ) from None
    except (SQLAlchemyError, StorageInternalError, OSError) as error:
        raise InputError(
            f"{name}: the storage cannot be used: {_reason(error)}; finished trials are kept. "
            "Check the address and that the server runs, then give the same command again"
        ) from None


def _reason(error: BaseException) -> str:
    """The first line of what the database or the system says."""
    cause = error.__cause__ if isinstance(error, StorageInternalError) else error
    original = getattr(cause, "orig", None) or cause or error
    text = getattr(original, "strerror", None) or str(original)
    return text.strip().split("\n")[0].rstrip(".") or type(error).__name__
