"""The command run in this process, and comparison with committed output."""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import chdir, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from shardopt.cli.app import main
from tests.conftest import Done
from tests.shardopt.conftest import a_plan

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
UPDATE = "SHARDOPT_UPDATE_GOLDEN"


Run = Callable[..., Done]
Refused = Callable[..., str]


def said_as_json(folder: Path, *words: object) -> dict[str, Any]:
    """Return a command's ``--json`` output in a folder, shared by the tests of a module."""
    with chdir(folder), redirect_stdout(StringIO()) as out:
        assert main([*map(str, words), "--json"]) == 0
    found: dict[str, Any] = json.loads(out.getvalue())
    return found


@pytest.fixture
def advice() -> None:
    """Asked for by tests of what `plan` advises, which takes it longer than a small search."""


@pytest.fixture
def run(
    request: pytest.FixtureRequest,
    kept_answers: None,
    run_main: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """Runs `shardopt`. What one test searched is not searched again for another."""
    if "advice" not in request.fixturenames:
        monkeypatch.setattr("shardopt.api.answer.with_advice", lambda answer, *_, **__: answer)
    return partial(run_main, main)


@pytest.fixture
def as_json(run: Run) -> Callable[..., Any]:
    """Runs a command that ends well with ``--json``; what it says."""

    def call(*words: object) -> Any:
        done = run(*words, "--json")
        assert done.code == 0, done.err
        return json.loads(done.out)

    return call


@pytest.fixture
def refused(run: Run) -> Refused:
    """Runs a command that ends in one message, with these words in it; what it says."""

    def call(*words: object, says: str | Sequence[str], code: int = 2) -> str:
        done = run(*words)
        assert (done.code, done.out) == (code, ""), done
        assert "shardopt: error: " in done.err
        assert "Traceback" not in done.err
        for word in (says,) if isinstance(says, str) else says:
            assert word in done.err
        return done.err

    return call


@pytest.fixture
def plan_data() -> dict[str, Any]:
    """`a_plan` that a test may change."""
    return a_plan()


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """`a_plan` as a file."""
    path = tmp_path / "given.json"
    path.write_text(json.dumps(a_plan()))
    return path


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compares text with a committed file; SHARDOPT_UPDATE_GOLDEN=1 writes the file instead."""

    def compare(name: str, text: str) -> None:
        # rich fills lines with blanks, editors strip them
        stripped = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
        path = GOLDEN / name
        if os.environ.get(UPDATE):
            path.parent.mkdir(exist_ok=True)
            path.write_text(stripped, encoding="utf-8")
        assert path.is_file(), f"no {path}; {UPDATE}=1 writes it"
        assert stripped == path.read_text(encoding="utf-8"), f"{UPDATE}=1 accepts the new text"

    return compare
