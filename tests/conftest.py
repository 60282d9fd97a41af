"""Settings that all tests share, and commands run in this process."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
import typer.main
from hypothesis import HealthCheck, settings

from tests.quick import SEED

# On a busy machine any example may be slow; time says nothing about correctness. The check repeats
# the same examples, nightly runs look for new ones.
settings.register_profile(
    "shardopt",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=SEED == 0,
)
settings.load_profile("shardopt")

NIGHTLY_TIMEOUT_S = 1200
CACHES = pytest.StashKey[TemporaryDirectory[str]]()
TESTS = count()


def pytest_configure(config: pytest.Config) -> None:
    """Neither the user's cache nor one that tests share: an answer of another test proves
    nothing."""
    config.stash[CACHES] = TemporaryDirectory(prefix="shardopt-caches-")


def pytest_unconfigure(config: pytest.Config) -> None:
    """The caches go with the session."""
    config.stash[CACHES].cleanup()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Keep what collection loads, torch among it, out of every later garbage collection; these take
    a sixth of the time of the tests otherwise."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A cache for each test, which the processes that it starts share."""
    os.environ["XDG_CACHE_HOME"] = os.path.join(item.config.stash[CACHES].name, str(next(TESTS)))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Nightly tests may take longer than the time limit of the others."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(NIGHTLY_TIMEOUT_S))


@pytest.fixture(scope="session", autouse=True)
def one_core() -> Iterator[None]:
    """Search in this process alone: every worker of the tests has a core, and processes that a
    search forks take twice as long together."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("search.side_by_side.usable_cores", lambda: 1)
        yield


@pytest.fixture(scope="session", autouse=True)
def commands_built_once() -> Iterator[None]:
    """Build the commands of a program once, as one process does; that takes most of the time of a
    command that refuses its input."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", lru_cache(typer.main.get_command))
        yield


class Done(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


@pytest.fixture
def run_main(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., Done]:
    """Runs a program's ``main`` with the given words in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def call(main: Callable[[list[str]], int], *words: object) -> Done:
        code = main([str(word) for word in words])
        return Done(code, *capsys.readouterr())

    return call
