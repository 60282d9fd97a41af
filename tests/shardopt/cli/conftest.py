"""The command run in this process, and comparison with committed output."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shardopt.cli.app import main

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
UPDATE = "SHARDOPT_UPDATE_GOLDEN"


class Done(NamedTuple):
    """What a command left behind."""

    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def run(
    kept_answers: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Run:
    """Runs `shardopt` with the given words in an empty directory. What one test searched is not
    searched again for another."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def call(*words: object) -> Done:
        code = main([str(word) for word in words])
        return Done(code, *capsys.readouterr())

    return call


@pytest.fixture
def plan_data() -> dict[str, Any]:
    """A plan for the model on 2 ranks, as plan.json holds it."""
    rows = {"users": 200000, "items": 50000, "days": 7}

    def table(kind: str, kernel: str, shards: list[list[Any]]) -> dict[str, Any]:
        return {
            "sharding_type": kind,
            "compute_kernel": kernel,
            "shards": [{"rank": r, "offset": o, "size": s} for r, o, s in shards],
        }

    return {
        "schema": "shardopt.plan/1",
        "hardware": "a100-80gb",
        "world_size": 2,
        "tables": {
            "users": table("table_wise", "fused", [[0, [0, 0], [rows["users"], 64]]]),
            "items": table(
                "column_wise",
                "fused",
                [[0, [0, 0], [rows["items"], 32]], [1, [0, 32], [rows["items"], 32]]],
            ),
            "days": table(
                "data_parallel", "dense", [[r, [0, 0], [rows["days"], 64]] for r in (0, 1)]
            ),
        },
    }


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
