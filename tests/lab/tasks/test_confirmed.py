"""Table of confirmed tasks; a run resumes where the last one ended."""

import re
from pathlib import Path
from typing import Any

import pytest

from lab.tasks import confirmed as room
from lab.tasks.confirmed import AGAIN, CONFIRMED, OURS, ConfirmedTasks, run_tasks, table
from predictor.errors import InputError


def task(seed: int, ours_ms: float, confirmed_ms: float, expected: float) -> dict[str, Any]:
    """TorchRec's plan takes 10 ms, and 10.1 ms the second time."""
    times = {"torchrec": 10.0, AGAIN: 10.1, OURS: ours_ms, CONFIRMED: confirmed_ms, "random_1": 12}
    gains = {name: {"value": 1 - ms / 10, "low": None, "high": None} for name, ms in times.items()}
    return {
        "seed": seed,
        "room": room.ROOM.get(seed % 4),
        "expected": {"value": expected, "low": expected - 0.02, "high": expected + 0.02},
        "confirm_seconds": 180.0,
        "gain": gains,
        "plans": {
            name: {
                "median_ms": ms,
                "predicted_ms": 22.0 if name == "random_1" else 2 * ms,
                "types": ["RW"],
            }
            for name, ms in times.items()
        },
    }


def test_the_table_compares_what_was_expected_with_what_was_measured() -> None:
    tasks = [task(0, 9.0, 9.0, 0.11), task(1, 9.5, 9.0, 0.09), {"seed": 2, "left_out": "no room"}]
    text = table(tasks)
    assert "2 tasks, 1 with room" in text
    assert "task 2" in text
    labels = (
        "against itself:",
        "expected minus measured",
        "interval:",
        "behind the best of twelve",
    )
    numbers = {name: re.search(rf"{name} ([-+]?[\d.]+)", text) for name in labels}
    values = {name: float(matched[1]) for name, matched in numbers.items() if matched}
    assert values == {
        "against itself:": 1.0,
        "expected minus measured": 2.5,  # 11 - 10 and 9 - 5 points
        "interval:": 50,
        "behind the best of twelve": 0.0,
    }
    shape = re.search(r"shape error ([\d.]+)", text)
    # of two plans as their times and one expected as 22 for 24
    assert shape is not None
    assert float(shape[1]) == pytest.approx(100 * (1 - 22 / 24) / 3, abs=0.1)


def test_a_run_goes_on_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []

    def run(tasks: ConfirmedTasks, seed: int, say: object) -> dict[str, Any]:
        ran.append(seed)
        if seed == 1:
            raise InputError("TorchRec's planner finds no plan that fits")
        if seed == 2 and ran.count(2) == 1:
            raise KeyboardInterrupt
        return task(seed, 9.0, 9.0, 0.1)

    monkeypatch.setattr(room, "_run", run)
    given = ConfirmedTasks(tmp_path / "set", [0, 1, 2], "shapes")
    with pytest.raises(KeyboardInterrupt):
        run_tasks(given, print)
    reports = run_tasks(given, print)
    assert ran == [0, 1, 2, 2]
    assert reports[1]["left_out"]
    assert "2 tasks" in table(reports)


def test_half_of_twenty_tasks_have_room() -> None:
    assert sum(seed % 4 in room.ROOM for seed in range(20)) == 10
