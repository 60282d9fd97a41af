"""Rounds in which benchmarks are timed: what is done is kept, and what is found in them."""

import os
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrec")

from lab.replay import compare
from lab.replay.compare import (
    BLOCK,
    DONE,
    MOST_FAVOURED,
    TURNS,
    capture,
    folder_of,
    hasten_main,
    measure,
    prepare,
    side_by_side,
    time_rounds,
)

NAMES = ("mlp", "mlp narrow")


def timed(original: float, replay: float, other_cores: float = 0.0) -> dict[str, Any]:
    first = {"wall_s": 5.0, "busy_s": 100.0, "own_s": 1.0}
    last = {"wall_s": 15.0, "busy_s": 109.0 + 10 * other_cores, "own_s": 10.0}
    return {
        "original_ms": [original, original + 1, original + 50],
        "replay_ms": [replay] * 3,
        "usage": [first, last],
        "coverage": {"total": 4, "us": 3.0, "total_us": 4.0, "reasons": {}},
    }


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list that fills with every capture and timing."""
    names: list[str] = []

    def captured(name: str, folder: Path) -> None:
        names.append(f"capture {name}")
        (folder / "traces").mkdir(parents=True)

    def measured(name: str, folder: Path) -> list[dict[str, Any]]:
        names.append(f"measure {name}")
        return [timed(10.0, 5.0 + len(names))]

    monkeypatch.setattr(compare, "capture", captured)
    monkeypatch.setattr(compare, "measure", measured)
    return names


def test_a_run_goes_on_where_one_before_it_ended(made: list[str], tmp_path: Path) -> None:
    (folder_of(tmp_path, "mlp") / "benchmark").mkdir(parents=True)
    assert list(prepare(NAMES, tmp_path)) == list(NAMES)
    assert made == ["capture mlp", "capture mlp narrow"]
    assert not (folder_of(tmp_path, "mlp") / "benchmark").exists()
    first = next(time_rounds(NAMES, tmp_path, 2))
    made.clear()
    assert list(prepare(NAMES, tmp_path)) == list(NAMES)
    rest = list(time_rounds(NAMES, tmp_path, 2))
    assert len(made) == len(rest) == 3
    assert {first, *rest} == {(name, at) for name in NAMES for at in range(2)}
    assert list(time_rounds(NAMES, tmp_path, 2)) == []


def test_rows_are_medians_over_rounds(made: list[str], tmp_path: Path) -> None:
    assert list(prepare(NAMES, tmp_path)) == list(NAMES)
    assert not side_by_side(NAMES, tmp_path)
    made.clear()
    for _ in time_rounds(("mlp",), tmp_path, 3):
        pass
    (row,) = side_by_side(NAMES, tmp_path)
    assert row["original_samples_ms"] == [11.0] * 3
    assert row["replay_samples_ms"] == [6.0, 7.0, 8.0]
    assert row["ratio"] == pytest.approx(7 / 11)
    assert row["host_us_an_op"] == pytest.approx(1000.0)
    assert row["coverage"] == 0.75
    assert (folder_of(tmp_path, "mlp") / DONE).is_file()


def test_rounds_that_other_work_disturbed_do_not_count(
    made: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def disturbed_at_first(name: str, folder: Path) -> list[dict[str, Any]]:
        made.append(f"measure {name}")
        return [timed(10.0, 5.0 + len(made), other_cores=0.5 if len(made) < 6 else 0.0)]

    assert list(prepare(("mlp",), tmp_path)) == ["mlp"]
    monkeypatch.setattr(compare, "measure", disturbed_at_first)
    made.clear()
    rounds = time_rounds(("mlp",), tmp_path, 3)
    next(rounds)
    assert len(made) == compare.TRIES
    (row,) = side_by_side(("mlp",), tmp_path)
    assert len(row["replay_samples_ms"]) == 1
    assert len(list(rounds)) == 2
    (row,) = side_by_side(("mlp",), tmp_path)
    assert row["replay_samples_ms"] == [11.0, 12.0]


@pytest.mark.parametrize("refuse", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_only_rank_is_real_time_and_others_stay_below_gloo(
    monkeypatch: pytest.MonkeyPatch, ranks: int, refuse: bool
) -> None:
    priorities: list[int] = []

    def set_priority(which: int, who: int, value: int) -> None:
        priorities.append(value)
        if refuse:
            raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", set_priority)
    monkeypatch.setattr(compare, "hasten_thread", lambda thread: priorities.append(thread))
    hasten_main(ranks)
    assert priorities == [threading.get_native_id() if ranks == 1 else MOST_FAVOURED]


@pytest.mark.slow
def test_a_model_is_timed_beside_its_replay(tmp_path: Path) -> None:
    capture("convnet small", tmp_path)
    (row,) = measure("convnet small", tmp_path)
    assert row["coverage"]["replayed"] == row["coverage"]["total"]
    assert len(row["original_ms"]) == len(row["replay_ms"]) == TURNS * BLOCK
