"""Gains of a made-up batch: predicted ones are known, measured ones are set."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from lab.suites import Report, run_suites
from lab.tasks.against import OURS, SHIPPED, THEIRS
from lab.validate.tasks.against_torchrec import NEAR, WORDS, validate_against_torchrec
from lab.validate.tasks.gains import QUIET
from predictor.errors import InputError
from shardopt.bench.rows import read_rows, write_rows
from shardopt.calibrate.rows import runtime_words
from shardopt.ranks.realtime import Runtime
from tests.lab.validate.reports import set_rounds, table

pytest.importorskip("scipy")

SOURCE = {
    THEIRS: "table_wise_by_lookups",
    OURS: "mixed",
    SHIPPED: "row_wise",
    "random_1": "replicated",
    "random_2": "row_wise",
}
"""Which of the batch's plans stands for which of ours."""
NOISE = (0.98, 0.99, 1.0, 1.01, 1.02, 1.0, 1.0, 1.0)
"""Of the rounds' ratios; their median is 1, and the 95 % interval is from 0.98 to 1.02."""


def measured(lab: Any, number: int, ratios: Mapping[str, float], end: str = "rows.json") -> None:
    """Rounds in which a plan takes so many times the time of TorchRec's plan."""
    rounds = [
        {name: 10.0 * ratio * (1.0 if name == THEIRS else noise) for name, ratio in ratios.items()}
        for noise in NOISE
    ]
    set_rounds(lab, f"task-{number:03d}.{end}", {name: SOURCE[name] for name in ratios}, rounds)


def predicted(report: Report) -> dict[int, float]:
    """The gain expected for our plan, by task."""
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
    group = ("tuned", "random", "batch-1")
    assert (ours["runtime"], ours["models"], ours["task set"]) == group
    assert (ours["tasks"], ours["faster"], ours["equal"], ours["slower"]) == (2, 1, 1, 0)
    mean = (0.3 - 0.005) / 2
    assert ours["median gain"] == ours["mean gain"] == pytest.approx(mean)
    assert (ours["least"], ours["largest"]) == pytest.approx((-0.005, 0.3))
    # Student's t of one degree of freedom: 12.706 standard errors of 0.305 / 2
    assert ours["from"] == pytest.approx(mean - 12.706 * 0.1525, rel=1e-3)
    assert ours["to"] == pytest.approx(mean + 12.706 * 0.1525, rel=1e-3)
    assert (shipped["tasks"], shipped["slower"], shipped["from"]) == (1, 1, None)


def test_what_was_expected_less_what_was_measured(report: Report) -> None:
    ours, shipped, foretold = table(report, "expected gains")
    of_ours = [row for row in table(report, "tasks") if row["plan"] == OURS]
    off = [row["expected"] - row["measured gain"] for row in of_ours]
    pairs = list(zip(predicted(report).values(), (-0.005, 0.3), strict=True))
    assert ours["mean expected"] - ours["mean measured"] == pytest.approx(sum(off) / 2)
    assert ours["expected - measured"] == pytest.approx(sum(off) / 2)
    assert ours["mean distance"] == pytest.approx(sum(map(abs, off)) / 2)
    assert ours["optimism"] == pytest.approx(
        sum(1 - (1 - gain) / (1 - is_) for gain, is_ in pairs) / 2
    )
    assert ours["within 5 points"] == sum(abs(difference) <= NEAR for difference in off) / 2
    # in the first task the clock names no plan, in the second prediction and clock may differ
    assert ours["same sign"] == (1 + (predicted(report)[2] > 0)) / 2
    assert shipped["plans"] == foretold["plans"] == 1
    assert shipped["mean measured"] == foretold["mean measured"]
    # the machine's calibration prices the plan in another way than the profile that chose it
    assert shipped["mean predicted"] != foretold["mean predicted"]


def test_random_plans_have_a_line_of_their_own(lab: Any) -> None:
    """A task counts once, however many plans it has; plans that take long do not count for more."""
    measured(lab, 1, {THEIRS: 1.0, OURS: 1.0, "random_1": 1.2, "random_2": 4.0})
    measured(lab, 2, {THEIRS: 1.0, OURS: 0.7, "random_1": 1.2})
    report = validate_against_torchrec(lab.root)
    line = table(report, "expected gains")[-1]
    assert (line["plans of"], line["tasks"], line["plans"]) == (WORDS["random plans"], 2, 3)
    times = {(row.name["task"], row.name["plan"]): row.predicted_ms for row in report.rows}
    ratios = [
        [(times[task, plan] / times[task, THEIRS], is_) for plan, is_ in plans]
        for task, plans in (
            (1, [("random_1", 1.2), ("random_2", 4.0)]),
            (2, [("random_1", 1.2)]),
        )
    ]
    expected = [sum(1 - p / m for p, m in pairs) / len(pairs) for pairs in ratios]
    assert line["optimism"] == pytest.approx(sum(expected) / 2)
    assert [row.name["plan"] for row in report.counted] == [THEIRS, OURS] * 2
    assert len(report.rows) == 7


def test_further_parts_are_held_against_their_own_first_plan(lab: Any) -> None:
    """The machine was half as fast while the second part ran."""
    measured(lab, 1, {THEIRS: 2.0, "random_2": 4.0}, "part-2.rows.json")
    measured(lab, 1, {THEIRS: 1.0, OURS: 1.0, "random_1": 1.2})
    measured(lab, 2, {THEIRS: 1.0, OURS: 1.0})
    report = validate_against_torchrec(lab.root)
    line = table(report, "expected gains")[-1]
    assert (line["tasks"], line["plans"]) == (1, 2)
    assert line["mean measured"] == pytest.approx(-0.6)
    names = [row.name["plan"] for row in report.rows if row.name["task"] == 1]
    assert names == [THEIRS, OURS, "random_1", "random_2"]


def second_batch(lab: Any, **about: str) -> Path:
    """The batch once more, as another runtime or family would have it."""
    folder = lab.folder.with_name("batch-2")
    shutil.copytree(lab.folder, folder)
    path = folder / "batch.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **about}))
    for rows_path in folder.glob("task-*.rows.json") if "runtime" in about else ():
        rows = read_rows(rows_path)
        rows.settings["runtime"] = about["runtime"]
        write_rows(rows_path, rows)
    if "runtime" in about:
        calibrated_in(folder, Runtime(about["runtime"]))
    return folder


def calibrated_in(folder: Path, runtime: Runtime) -> None:
    """Let the rows of a calibration say in which runtime they were measured."""
    path = folder / "calibration.rows.csv"
    with path.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    with path.open("w", newline="") as lines:
        writer = csv.DictWriter(lines, list(rows[0]))
        writer.writeheader()
        writer.writerows({**row, "settings": runtime_words(runtime)} for row in rows)


def test_runtimes_are_never_in_one_line(report: Report, lab: Any) -> None:
    second_batch(lab, runtime="plain", models="shapes")
    rows = table(validate_against_torchrec(lab.root), "against TorchRec's planner")
    groups = [(r["runtime"], r["models"], r["task set"], r["tasks"]) for r in rows]
    assert groups[:2] == [("tuned", "random", "batch-1", 2), ("plain", "shapes", "batch-2", 2)]


def test_families_are_in_lines_of_their_own_and_in_one(report: Report, lab: Any) -> None:
    second_batch(lab, models="shapes")
    rows = table(validate_against_torchrec(lab.root), "against TorchRec's planner")
    groups = [
        (r["models"], r["task set"], r["tasks"]) for r in rows if r["plans of"] == WORDS[OURS]
    ]
    assert groups == [("all", "all", 4), ("random", "batch-1", 2), ("shapes", "batch-2", 2)]


def test_a_batch_that_mixes_runtimes_is_refused(report: Report, lab: Any) -> None:
    folder = second_batch(lab, runtime="plain")
    rows = read_rows(folder / "task-002.rows.json")
    del rows.settings["runtime"]
    write_rows(folder / "task-002.rows.json", rows)
    with pytest.raises(
        InputError, match=r"in the tuned runtime, but batch\.json says 2 in the plain"
    ):
        validate_against_torchrec(lab.root)


def test_a_calibration_of_another_runtime_is_refused(report: Report, lab: Any) -> None:
    calibrated_in(second_batch(lab, runtime="plain"), Runtime.TUNED)
    with pytest.raises(InputError, match="calibrated in the tuned runtime, but batch"):
        validate_against_torchrec(lab.root)


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
    assert line["under load"] == 2


def test_tasks_measured_under_load_are_named(report: Report, lab: Any) -> None:
    def disturb(rounds: list[dict[str, Any]]) -> None:
        for loaded in rounds[6:]:
            loaded["other_cores"] = 1.0
            loaded["ranks_ms"][OURS] = [[1000.0] * 2] * 2

    change_rounds(lab, 2, disturb)
    found = validate_against_torchrec(lab.root)
    assert "under load: batch-1 task-002 (2 of 8 rounds)" in " ".join(found.notes)
    assert any("under load: none" in note for note in report.notes)
    ours = table(found, "against TorchRec's planner")[0]
    assert ours["mean, all rounds"] == pytest.approx(ours["mean gain"], abs=0.01)
    assert ours["mean, all rounds"] < ours["mean gain"]


def test_a_task_with_too_few_quiet_rounds_is_named(report: Report, lab: Any) -> None:
    change_rounds(lab, 1, lambda rounds: rounds.__delitem__(slice(5, None)))
    found = validate_against_torchrec(lab.root)
    assert [row["task"] for row in table(found, "tasks")] == ["batch-1 task-002"]
    assert found.skipped == (
        "batch-1 task-001: only 5 of 5 rounds without other work, and 6 are needed; measure more "
        "rounds with the same command",
    )


def test_rows_of_another_batch_are_refused(lab: Any) -> None:
    names = {name: name for name in SOURCE.values()}
    set_rounds(lab, "task-001.rows.json", names, [dict.fromkeys(names, 1.0)] * 8)
    with pytest.raises(InputError, match="task-001: its plans are table_wise_by_lookups"):
        validate_against_torchrec(lab.root)


@pytest.mark.slow
def test_the_committed_batches_keep_their_promise() -> None:
    """No plan is slower in either runtime, and the expected gain is near the measured one."""
    (report,) = run_suites("against-torchrec", None)

    def of_ours(name: str, runtime: str) -> dict[str, Any]:
        return next(
            row
            for row in table(report, name)
            if (row["plans of"], row["runtime"]) == (WORDS[OURS], runtime)
        )

    for runtime, tasks in (("tuned", 10), ("plain", 20)):
        ours = of_ours("against TorchRec's planner", runtime)
        assert ours["tasks"] >= tasks
        assert ours["slower"] == 0
        assert ours["mean gain"] >= 0.03
        assert ours["from"] > 0
        expected = of_ours("expected gains", runtime)
        assert expected["same sign"] == 1
        assert expected["within 5 points"] >= 0.8
    # something else kept a core busy in most of its rounds
    assert [text.partition(":")[0] for text in report.skipped] == [
        "2026-11-22-plain-shapes task-008"
    ]
