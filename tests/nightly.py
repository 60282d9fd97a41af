"""Plugin of `make test-nightly`: tests that passed for this commit and seed are not run again.

``python -m tests.nightly`` prints the folder that lists them.
"""

from __future__ import annotations

import subprocess
import zlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from tests.quick import SEED

ROOT = Path(__file__).resolve().parent.parent
PASSED = pytest.StashKey[set[str]]()


def git(*words: str) -> bytes:
    """Output of a git command in this repository."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True).stdout


def folder() -> Path:
    """Folder of this seed, commit and TorchRec; uncommitted changes make another one."""
    commit = git("rev-parse", "--short=12", "HEAD").decode().strip()
    if changes := git("status", "--porcelain") + git("diff", "HEAD"):
        commit += f"+{zlib.crc32(changes):08x}"
    try:
        torchrec = version("torchrec")
    except PackageNotFoundError:
        torchrec = "none"
    return ROOT / ".nightly" / f"{commit}-seed-{SEED}-torchrec-{torchrec}"


def pytest_configure(config: pytest.Config) -> None:
    """Read what passed; workers of xdist are told, so that all of them collect the same tests."""
    given: Any = getattr(config, "workerinput", None)
    if given is not None:
        config.stash[PASSED] = set(given["passed"])
        return
    file = folder() / "passed"
    config.stash[PASSED] = set(file.read_text().splitlines()) if file.is_file() else set()
    config.pluginmanager.register(Recorder(file))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of xdist what passed."""
    node.workerinput["passed"] = sorted(node.config.stash[PASSED])


def pytest_report_header(config: pytest.Config) -> str:
    """Print the seed and how to repeat the run."""
    return f"seed: {SEED} (SHARDOPT_SEED), {len(config.stash[PASSED])} tests passed before"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what passed."""
    passed = config.stash[PASSED]
    done = [item for item in items if item.nodeid in passed]
    items[:] = [item for item in items if item.nodeid not in passed]
    config.hook.pytest_deselected(items=done)


class Recorder:
    """Appends the name of every test that passes to a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        file.parent.mkdir(parents=True, exist_ok=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the call; a failed teardown runs the test again only under another commit."""
        if report.when == "call" and report.passed:
            with self.file.open("a") as passed:
                passed.write(f"{report.nodeid}\n")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """End well where everything had passed before."""
    if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.stash[PASSED]:
        session.exitstatus = pytest.ExitCode.OK


if __name__ == "__main__":
    print(folder())
