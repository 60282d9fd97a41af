"""Success criteria of the commands that try a wheel."""

from pathlib import Path

import pytest

from lab.tools.try_wheel import Case, lacks, problem_of


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Says its words on stdout and stderr; ends with the first one as its exit code."""
    path = tmp_path / "program"
    path.write_text('#!/bin/sh\necho "$2"\necho "$3" >&2\ntouch made\nexit "$1"\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (Case("0 fine x", "fine"), None),
        (Case("1 fine x", "fine"), "exit code 1 instead of 0"),
        (Case("0 fine Traceback", "fine"), "does not say"),
        (Case("0 x fine", "fine"), "does not say 'fine'"),
        (Case("0 fine x", "fine", writes="made"), "made is empty"),
        (lacks("2 x --data", "--data"), None),
        (lacks("0 x --data", "--data"), "exit code 0 instead of 2"),
    ],
)
def test_problems(program: Path, tmp_path: Path, case: Case, words: str | None) -> None:
    problem = problem_of(case, program, tmp_path)
    assert problem is None if words is None else words in (problem or "")
