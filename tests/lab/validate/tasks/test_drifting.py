"""Worst windows of made-up tasks: times are set, so ratios are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from lab.suites import Report, run_suites
from lab.tasks.task_set import split_window
from lab.validate.tasks.drifting import validate_drifting
from predictor.errors import InputError
from tests.lab.validate.reports import set_rounds, table

pytest.importorskip("scipy")

THEIRS, OURS, BOTH = "torchrec", "nominal = nominal perturbed", "regret = regret perturbed"
SOURCE = {THEIRS: "table_wise_by_lookups", OURS: "mixed", BOTH: "row_wise"}
"""Which of the batch's plans stands for which."""
SAME = "nominal = regret = nominal perturbed = regret perturbed"
ROUNDS = 8


def measured(lab: Any, number: int, times: Mapping[str, float]) -> None:
    """A task in two windows, in rounds that differ by up to 2 %."""
    stem = f"task-{number:03d}"
    sources = {name: SOURCE.get(split_window(name)[0], "mixed") for name in times}
    rounds = [{name: ms * (1 + at % 3 / 100) for name, ms in times.items()} for at in range(ROUNDS)]
    set_rounds(lab, f"{stem}.rows.json", sources, rounds)
    model = (lab.folder / f"{stem}.yaml").read_text()
    (lab.folder / f"{stem}.window-2.yaml").write_text(model)


@pytest.fixture
def report(lab: Any) -> Report:
    """In the first task the plan of least regret costs 1 % and saves 10 % in the second window; in
    the other both are the same."""
    measured(
        lab,
        1,
        {
            **{f"{THEIRS} @1": 12.0, f"{OURS} @1": 10.0, f"{BOTH} @1": 10.1},
            **{f"{THEIRS} @2": 11.0, f"{OURS} @2": 15.0, f"{BOTH} @2": 13.5},
        },
    )
    measured(
        lab, 2, {f"{THEIRS} @1": 12.0, f"{SAME} @1": 9.0, f"{THEIRS} @2": 13.0, f"{SAME} @2": 9.5}
    )
    return validate_drifting(lab.root)


def test_worst_windows_are_compared_where_plans_differ(report: Report) -> None:
    hedged = table(report, "worst window")[0]
    assert (hedged["plan"], hedged["against"]) == ("regret", "nominal")
    assert (hedged["tasks"], hedged["same plan"]) == (2, 1)
    assert (hedged["worse"], hedged["better"]) == (0, 1)
    assert hedged["median"] == pytest.approx(-0.1)
    assert hedged["first window"] == pytest.approx(0.01)
    assert hedged["mean of windows"] == pytest.approx((10.1 + 13.5) / 25 - 1)
    baseline = table(report, "worst window")[2]
    assert (baseline["same plan"], baseline["worse"], baseline["better"]) == (0, 1, 1)


def test_every_task_has_its_line(report: Report) -> None:
    first, second = table(report, "by task")
    assert first["nominal, worst"] == pytest.approx(15.0 * 1.01)
    assert first["torchrec, worst"] == pytest.approx(12.0 * 1.01)
    assert second["plans"] == f"{THEIRS}; {SAME}"
    assert second["regret to nominal, worst"] == 0


def test_perturbed_profiles_are_compared_in_the_windows_that_were_run(report: Report) -> None:
    hedged = table(report, "perturbed profiles")[0]
    assert (hedged["plan"], hedged["against"]) == ("regret perturbed", "nominal perturbed")
    assert (hedged["same plan"], hedged["median"]) == (1, pytest.approx(-0.1))
    assert hedged["first window"] == pytest.approx(0.01)
    assert (hedged["regret"], hedged["regret of the other"]) == pytest.approx((0.01, 15 / 13.5 - 1))
    assert (hedged["beyond noise worse"], hedged["beyond noise better"]) == (0, 1)
    assert hedged["from"] is None, "one task has no interval"


def test_every_plan_is_predicted_in_every_window(report: Report) -> None:
    families = [row.family for row in report.rows]
    assert [families.count(f"window {n}") for n in (1, 2)] == [5, 5]
    assert report.summary.n == 10


def test_a_task_of_other_data_is_refused(lab: Any) -> None:
    with pytest.raises(InputError, match="'torchrec'"):
        validate_drifting(_with_rounds(lab).root)


def _with_rounds(lab: Any) -> Any:
    for number in (1, 2):
        measured(lab, number, {"mixed": 1.0, "row_wise": 2.0})
    return lab


@pytest.mark.slow
def test_committed_plans_of_least_regret_gain_where_they_differ() -> None:
    """In windows that drift; in the older set, whose windows hardly differ, none is clearly
    behind."""
    (report,) = run_suites("drifting", None)
    rows = table(report, "by task")
    assert len(rows) >= 40
    assert not [row["task"] for row in rows if row["from"] > 0.01]
    line = table(report, "worst window")[3]
    assert (line["task set"], line["plan"], line["against"]) == (
        "2026-11-23-plain",
        "regret",
        "nominal",
    )
    assert line["worse"] == 0
    assert line["to"] < 0
    assert line["median"] < -0.03
    assert line["first window"] < 0.01
