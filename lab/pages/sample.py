"""The answer at the head of the README: the main lines that its command prints."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from predictor.errors import InputError

BLOCK = re.compile(r"^```console\n\$ shardopt (plan [^\n]*)\n(.*?)^```", re.M | re.S)
WIDTH = "100"
"""Columns of the console; lines of the README have at most so many."""
CUT = "..."
ADVICE, PLANS, PROVED = "Advice  ", "Plans  ", ("Proved:", "Lower bound:")
THEIRS = "TorchRec's planner"


def with_sample(readme: str, root: Path, where: str = "README.md") -> str:
    """Run the README's `plan` command, and return the README with its answer.

    Raises:
        InputError: the README has no such block, or the command fails.
    """
    match = BLOCK.search(readme)
    if match is None:
        raise InputError(f"{where}: lacks a console block that begins with '$ shardopt plan'")
    lines = "\n".join(main_lines(run(match[1], root).splitlines()))
    return f"{readme[: match.start(2)]}{lines}\n{readme[match.end(2) :]}"


def run(words: str, root: Path) -> str:
    """Run a `shardopt` command with its output files in a temporary folder; return its stdout.

    Raises:
        InputError: it fails.
    """
    with TemporaryDirectory() as folder:
        arguments = [
            str(Path(folder) / word) if flag in ("-o", "--output") else word
            for flag, word in zip(["", *shlex.split(words)], shlex.split(words), strict=False)
        ]
        command = [sys.executable, "-m", "shardopt", *arguments, "--no-cache"]
        environment = {"COLUMNS": WIDTH, "PYTHONPATH": str(root), "PATH": "", "NO_COLOR": "1"}
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise InputError(f"shardopt {words}: ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def main_lines(lines: list[str]) -> Iterator[str]:
    """Yield the verdict, the first advice, the best plan beside TorchRec's, and the bound."""
    lines = [line.rstrip() for line in lines]
    yield from lines[: lines.index("")]
    advice = _table(lines, ADVICE)
    if advice:
        yield from advice[:2]
        yield from _entry(advice[3:])
        yield CUT
    plans = _table(lines, PLANS)
    yield from plans[:2]
    yield from plans[3:4]
    yield from (line for line in plans[4:] if line.endswith(THEIRS))
    yield from (line for line in lines if line.startswith(PROVED))


def _table(lines: list[str], title: str) -> list[str]:
    """Return the lines of the paragraph that begins with a title; none without one."""
    start = next((at for at, line in enumerate(lines) if line.startswith(title)), len(lines))
    rest = lines[start:]
    return rest[: rest.index("")] if "" in rest else rest


def _entry(rows: list[str]) -> Iterator[str]:
    """Yield the first entry of a table, with its continuation lines."""
    yield from rows[:1]
    for row in rows[1:]:
        if not row.startswith(" " * 10):
            return
        yield row
