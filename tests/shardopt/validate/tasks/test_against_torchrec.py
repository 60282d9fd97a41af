"""Gains of a made-up batch: predicted ones are known, measured ones are set."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from predictor.errors import InputError
from shardopt.bench.rows import read_rows, write_rows
from shardopt.bench.tasks.against import OURS, SHIPPED, THEIRS
from shardopt.cli import app
from shardopt.report.validate import scores_object
from shardopt.validate.report import Report
from shardopt.validate.suites import run_suites
from shardopt.validate.tasks.against_torchrec import NEAR, QUIET, validate_against_torchrec

pytest.importorskip("scipy")

SOURCE = {THEIRS: "table_wise_by_lookups", OURS: "mixed", SHIPPED: "row_wise"}
"""Which of the batch's plans stands for which of ours."""
NOISE = (0.98, 0.99, 1.0, 1.01, 1.02, 1.0, 1.0, 1.0)
"""Of the rounds' ratios; their median is 1, and the 95 % interval is from 0.98 to 1.02."""


def measured(lab: Any, number: int, ratios: Mapping[str, float]) -> None:
    """Rounds in which a plan takes so many times the time of TorchRec's plan."""
    path = lab.folder / f"task-{number:03d}.rows.json"
    rows = read_rows(path)
    entries = {entry["name"]: entry["plan"] for entry in rows.plans}
    rows.plans = [{"name": name, "plan": entries[SOURCE[name]]} for name in ratios]
    first = rows.rounds[0]
    rows.rounds = [
        {
            **first,
            "round": at,
            "order": list(ratios),
            "lead_ms": {name: [1.0, 1.0] for name in ratios},
            "ranks_ms": {
                name: [[10.0 * ratio * (1.0 if name == THEIRS else noise)] * 2] * 2
                for name, ratio in ratios.items()
            },
        }
        for at, noise in enumerate(NOISE)
    ]
    write_rows(path, rows)


def table(report: Report, name: str) -> list[dict[str, Any]]:
    found = next(scores for scores in report.scores if scores.name == name)
    return scores_object(found)["rows"]


def predicted(report: Report) -> dict[int, float]:
    """The gain foretold for our plan, by task."""
    times = {(row.name["task"], row.name["plan"]): row.predicted_ms for row in report.rows}
    return {n: 1 - times[n, OURS] / times[n, THEIRS] for n in (1, 2)}


@pytest.fixture
def report(lab: Any) -> Report:
    """Ours is half a percent slower in the first task, and much faster in the second."""
    measured(lab, 1, {THEIRS: 1.0, OURS: 1.005, SHIPPED: 1.3})
    measured(lab, 2, {THEIRS: 1.0, OURS: 0.7})
    return validate_against_torchrec(lab.root)


def test_a_line_a_task_and_plan(report: Report) -> None:
    rows = {(row["task"], row["plan"]): row for row in table(report, "tasks")}
    assert len(rows) == 3
    equal = rows["batch-1 task-001", OURS]
    assert equal["verdict"] == "equal"
    assert equal["measured gain"] == pytest.approx(-0.005)
    assert (equal["from"], equal["to"]) == pytest.approx((1 - 1.005 * 1.02, 1 - 1.005 * 0.98))
    assert equal["predicted gain"] == pytest.approx(predicted(report)[1])
    assert (equal["TorchRec's types"], equal["types"]) == ("TW", "TW+RW")
    faster = rows["batch-1 task-002", OURS]
    assert (faster["verdict"], faster["measured gain"]) == ("faster", pytest.approx(0.3))
    assert rows["batch-1 task-001", SHIPPED]["verdict"] == "slower"


def test_all_tasks_in_a_line(report: Report) -> None:
    ours, shipped = table(report, "against TorchRec's planner")
    off = [
        abs(gain - is_) for gain, is_ in zip(predicted(report).values(), (-0.005, 0.3), strict=True)
    ]
    assert (ours["tasks"], ours["faster"], ours["equal"], ours["slower"]) == (2, 1, 1, 0)
    assert ours["median gain"] == pytest.approx((0.3 - 0.005) / 2)
    assert ours["largest"] == pytest.approx(0.3)
    assert ours["mean distance"] == pytest.approx(sum(off) / 2)
    assert ours["within 5 points"] == sum(of <= NEAR for of in off)
    # in the first task the clock names no plan, in the second prediction and clock may differ
    assert ours["same sign"] == 1 + (predicted(report)[2] > 0)
    assert (shipped["tasks"], shipped["slower"]) == (1, 1)


def change_rounds(lab: Any, number: int, change: Callable[[list[dict[str, Any]]], None]) -> None:
    path = lab.folder / f"task-{number:03d}.rows.json"
    rows = read_rows(path)
    change(rows.rounds)
    write_rows(path, rows)


def test_rounds_beside_other_work_count_for_no_plan(report: Report, lab: Any) -> None:
    def disturb(rounds: list[dict[str, Any]]) -> None:
        for noisy, work in ((rounds[6], QUIET + 0.01), (rounds[7], 2.0)):
            noisy["other_cores"] = work
            noisy["ranks_ms"][OURS] = [[100.0] * 2] * 2
        rounds[0]["other_cores"] = QUIET
        rounds[1]["other_cores"] = None

    change_rounds(lab, 2, disturb)
    (line,) = (r for r in table(validate_against_torchrec(lab.root), "tasks") if r["rounds"] == 6)
    assert line["task"] == "batch-1 task-002"
    assert line["measured gain"] == pytest.approx(0.3)
    assert line["ms"] == pytest.approx(7.0)


def test_a_task_with_too_few_quiet_rounds_is_named(report: Report, lab: Any) -> None:
    change_rounds(lab, 1, lambda rounds: rounds.__delitem__(slice(5, None)))
    found = validate_against_torchrec(lab.root)
    assert [row["task"] for row in table(found, "tasks")] == ["batch-1 task-002"]
    assert found.skipped == (
        "batch-1 task-001: only 5 rounds without other work; measure more rounds "
        "with `shardopt bench against`",
    )


def test_rows_of_another_batch_are_refused(lab: Any) -> None:
    with pytest.raises(InputError, match="task-001: its plans are table_wise_by_lookups"):
        validate_against_torchrec(lab.root)


@pytest.mark.parametrize(("made", "words"), [(True, "holds no task set"), (False, "no such direc")])
def test_a_folder_without_batches(tmp_path: Path, made: bool, words: str) -> None:
    folder = tmp_path / "none"
    if made:
        folder.mkdir()
    with pytest.raises(InputError, match=words):
        validate_against_torchrec(folder)


def test_the_command_prints_it(
    report: Report, lab: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    code = app.main(["validate", "against-torchrec", "--data", str(lab.root), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert found["n"] == 5
    assert found["scores"]["tasks"]["rows"] == table(report, "tasks")


def test_the_committed_batch_keeps_its_promise() -> None:
    """Faster or equal in every task, and foretold."""
    (report,) = run_suites("against-torchrec", None)
    (ours, *_) = table(report, "against TorchRec's planner")
    assert ours["tasks"] >= 10
    assert ours["slower"] == 0
    assert ours["median gain"] > 0
    assert ours["same sign"] == ours["within 5 points"] == ours["tasks"]
    assert not report.skipped
