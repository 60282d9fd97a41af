"""Waiting told from sums, on tasks whose times are set by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lab.pages.scores import scores_object
from lab.suites import SUITES
from lab.validate.tasks.ablations import SUMS
from lab.validate.tasks.tables import BALANCED, over_balanced, synchronisation

CROSSED, SAME_RANK = "crossed", "same_rank"


def task(plans: dict[str, tuple[float, float, float]]) -> Any:
    """Plan -> measured, predicted and summed ms."""
    measured, predicted, sums = (np.array(times) for times in zip(*plans.values(), strict=True))
    return SimpleNamespace(
        plans=list(plans), measured_ms=measured, predicted_ms=predicted, ablated_ms={SUMS: sums}
    )


TASKS = [
    task({BALANCED: (20.0, 22.0, 21.9), CROSSED: (30.0, 33.0, 24.0), SAME_RANK: (40, 42, 42)}),
    task({CROSSED: (36.0, 36.0, 27.0), BALANCED: (30.0, 30.0, 29.7)}),
    task({"row_wise": (50.0, 40.0, 37.0)}),
]


def rows(name: str, lines: Any) -> list[dict[str, Any]]:
    scored: list[dict[str, Any]] = scores_object(SUITES["torchrec-cpu"].table(name, lines))["rows"]
    return scored


def test_plans_are_classed_by_the_predicted_waiting() -> None:
    below, little, more, most = rows("synchronisation", synchronisation(TASKS))
    assert [line["n"] for line in (below, little, more, most)] == [2, 1, 1, 2]
    assert below["waiting"] == "below 1 %"
    assert below["error"] == pytest.approx((0.1 + 0.05) / 2)
    assert (little["waiting"], little["bias of sums"]) == ("1 to 5 %", pytest.approx(-0.01))
    assert (more["waiting"], more["bias"]) == ("5 to 10 %", pytest.approx(-0.2))
    assert most["waiting"] == "from 10 %"
    assert (most["error"], most["bias"]) == pytest.approx((0.05, 0.05))
    assert (most["error of sums"], most["bias of sums"]) == pytest.approx((0.225, -0.225))


def test_a_class_without_plans_has_no_errors() -> None:
    lines = rows("synchronisation", synchronisation(TASKS[2:]))
    assert [line["n"] for line in lines] == [0, 0, 1, 0]
    assert lines[0]["error"] is None or np.isnan(lines[0]["error"])


def test_plans_are_compared_with_the_balanced_one_of_their_task() -> None:
    crossed, same = rows("plans over the balanced one", over_balanced(TASKS))
    assert (crossed["plan"], crossed["n"]) == (CROSSED, 2)
    assert crossed["measured"] == pytest.approx((0.5 + 0.2) / 2)
    assert crossed["predicted"] == pytest.approx((0.5 + 0.2) / 2)
    sums = np.array([24.0 / 21.9, 27.0 / 29.7]) - 1
    assert crossed["sums"] == pytest.approx(sums.mean())
    assert crossed["distance"] == pytest.approx(0.0, abs=1e-9)
    assert crossed["distance of sums"] == pytest.approx(np.abs(sums - [0.5, 0.2]).mean())
    assert (same["plan"], same["measured"]) == (SAME_RANK, pytest.approx(1.0))


def test_other_tasks_have_no_such_table() -> None:
    assert over_balanced(TASKS[2:]) == []
