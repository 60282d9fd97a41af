"""Every score of a made-up batch, whose measured times are predicted ones times known factors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lab import cli as app
from lab.statistics import wilson
from lab.suites import Report
from lab.validate.tasks import tables as ranking
from lab.validate.tasks import task_prediction
from lab.validate.tasks.torchrec_cpu import (
    ALL,
    DEVELOPED,
    FRESH,
    UNCORRECTED,
    validate_torchrec_cpu,
)
from predictor.errors import InputError
from shardopt.calibrate.rows import Origin
from tests.lab.validate.reports import table

pytest.importorskip("scipy")

FACTOR = 1.25
"""Measured over predicted, everywhere in the second task."""


def first_task(predicted: np.ndarray) -> np.ndarray:
    """The predicted order with its first two swapped; the pick is 4 % slower than the best."""
    order = np.argsort(predicted)
    measured = np.empty_like(predicted)
    measured[order] = 1.1 * predicted[order[1]] * np.array([1.04, 1.0, 2.0, 3.0])
    return measured


@pytest.fixture(scope="module")
def report(kept_lab, times_of: Callable[[Report], dict[int, np.ndarray]]) -> Report:
    predicted = times_of(validate_torchrec_cpu(kept_lab.root))
    kept_lab.task(1, "base", first_task(predicted[1]))
    kept_lab.again(1, "base", 1.02 * first_task(predicted[1]))
    kept_lab.task(2, "sparse_dist", FACTOR * predicted[2])
    return validate_torchrec_cpu(kept_lab.root)


def errors_of_first(report: Report) -> np.ndarray:
    predicted = np.array([r.predicted_ms for r in report.rows if r.name["task"] == 1])
    return predicted / first_task(predicted) - 1


def test_rows_name_plan_types_and_time(report: Report) -> None:
    assert len(report.rows) == 8
    row = report.rows[2]
    assert row.name["plan"] == "mixed"
    assert row.name["types"] == "TW+RW"
    assert row.name["minutes"] == 45.0
    assert row.name["uncorrected_ms"] == pytest.approx(row.predicted_ms)
    assert report.rows[4].measured_ms == pytest.approx(FACTOR * report.rows[4].predicted_ms)


def test_absolute_errors(report: Report) -> None:
    lines = {line["plans"]: line for line in table(report, "absolute error")}
    first, second = errors_of_first(report), np.full(4, 1 / FACTOR - 1)
    both = np.concatenate((first, second))
    total = lines["all"]
    assert total["n"] == 8
    assert total["mean"] == pytest.approx(np.abs(both).mean())
    assert total["geomean"] == pytest.approx(np.exp(np.log(np.abs(both)).mean()))
    assert total["bias"] == pytest.approx(both.mean())
    worst = int(np.abs(both).argmax())
    assert total["worst"] == pytest.approx(both[worst])
    assert (
        total["worst plan"] == f"batch-1 task-00{worst // 4 + 1} {report.rows[worst].name['plan']}"
    )
    assert total["mean, no drift correction"] == pytest.approx(total["mean"])
    assert lines["pipeline sparse_dist"]["mean"] == pytest.approx(0.2)
    assert lines["topology loopback"]["n"] == 8
    assert lines["minutes after calibration up to 60"]["n"] == 8
    assert {"types TW", "types RW", "types TW+RW", "types TW+DP"} <= set(lines)
    assert lines["types TW"]["n"] == 2


def test_ranking(report: Report) -> None:
    line = table(report, "ranking")[0]
    first = np.log1p(errors_of_first(report))
    shape = np.abs(np.expm1(first - np.median(first)))
    assert line["tasks"] == 2
    assert line["plans"] == 8
    assert line["shape error"] == pytest.approx(shape.sum() / 8)
    assert line["Spearman min"] == pytest.approx(0.8)
    assert line["Spearman median"] == pytest.approx(0.9)
    assert line["faster half min"] == pytest.approx(-1.0)
    assert line["faster half median"] == pytest.approx(0.0)


def test_picking(report: Report) -> None:
    lines = {line["picker"]: line for line in table(report, "picking")}
    ours = lines["predicted fastest"]
    assert ours["fastest"] == pytest.approx([0.5, *wilson(0.5, 2)])
    assert ours["within 2 %"][0] == 0.5
    assert ours["within 5 %"][0] == ours["within 10 %"][0] == 1.0
    assert ours["mean regret"] == pytest.approx(0.02)
    assert ours["max regret"] == pytest.approx(0.04)
    measured = [
        np.array([r.measured_ms for r in report.rows if r.name["task"] == number])
        for number in (1, 2)
    ]
    lost = np.array([times / times.min() - 1 for times in measured])
    assert lines["random"]["fastest"][0] == pytest.approx(0.25)
    assert lines["random"]["mean regret"] == pytest.approx(lost.mean())
    assert lines["table_wise by lookups"]["mean regret"] == pytest.approx(lost[:, 0].mean())
    assert lines["TorchRec's estimator"]["tasks"] == 2


def test_truth_against_truth(report: Report) -> None:
    halves, again = table(report, "truth against truth")
    assert halves["error"] == pytest.approx(1 - 0.95 / 1.05)
    assert halves["tasks"] == 2
    assert again["error"] == pytest.approx(0.02)
    assert again["tasks"] == 1
    for line in (halves, again):
        assert line["shape error"] == pytest.approx(0.0, abs=1e-9)
        assert line["Spearman min"] == pytest.approx(1.0)
        assert line["fastest"][0] == 1.0
        assert line["max regret"] == 0.0


def test_intervals_ablations_kernels_and_tasks(report: Report) -> None:
    line = table(report, "90 % intervals")[0]
    assert line["n"] == 8
    assert 0 <= line["covered"] <= 1
    assert line["median width"] > 0
    ablations = {line["predictor"]: line for line in table(report, "ablations")}
    assert len(ablations) == 6
    assert ablations["everything"]["error"] == table(report, "ranking")[0]["error"]
    assert ablations["everything"]["within 5 %"] == 1.0
    waiting = table(report, "synchronisation")
    assert [line["n"] for line in waiting] == [8, 0, 0, 0]
    assert waiting[0]["error"] == ablations["everything"]["error"]
    kernels = {line["family"]: line["n"] for line in table(report, "held-out kernels")}
    assert kernels["all_to_all"] > 0
    tasks = table(report, "tasks")
    assert [line["task"] for line in tasks] == ["batch-1 task-001", "batch-1 task-002"]
    assert tasks[0]["regret"] == pytest.approx(0.04)
    assert tasks[1]["error"] == pytest.approx(0.2)


def test_a_slower_machine_is_corrected(lab, times_of) -> None:
    before = times_of(validate_torchrec_cpu(lab.root))
    lab.task(1, "base", 2 * before[1], slower=2.0)
    report = validate_torchrec_cpu(lab.root)
    errors = table(report, "tasks")
    assert errors[0]["error"] == pytest.approx(0.0, abs=1e-6)
    raw = [r.name["uncorrected_ms"] for r in report.rows if r.name["task"] == 1]
    assert raw == pytest.approx(list(before[1]))


def test_ranks_on_hosts_of_their_own_use_the_measured_link(lab, times_of) -> None:
    before = times_of(validate_torchrec_cpu(lab.root))
    lab.about(local_world_size=1, topology="0.5 Gbit/s")
    with pytest.raises(InputError, match=r"link_gbit_s is None with 1 of 2 ranks a host"):
        validate_torchrec_cpu(lab.root)
    lab.about(local_world_size=1, link_gbit_s=0.5, topology="0.5 Gbit/s")
    lab.calibration(link_gbit_s=0.5)
    after = times_of(validate_torchrec_cpu(lab.root))
    assert after[1] == pytest.approx(before[1])


def test_a_task_without_rows_is_left_out(lab) -> None:
    lab.about(tasks=[1, 2, 3])
    assert validate_torchrec_cpu(lab.root).skipped == ("batch-1 task-003: not measured",)


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("task-002.rows.json", '"ranks_ms"', '"rank_ms"', r"task-002\.rows\.json:\d+: rounds\[0\]"),
        ("calibration.rows.csv", '"bytes"":1024', '"bytes"":', r"calibration\.rows\.csv:2: "),
        (
            "task-001.rows.json",
            "2026-01-01T00:45",
            "2026-13-01T00:45",
            r"rounds.2.: at: '2026-13",
        ),
        (
            "task-001.rows.json",
            '"torchrec": "1.8.0"',
            '"torchrec": "1.9.0"',
            r"'1\.9\.0'.*mixed",
        ),
        ("task-001.rows.json", '"sha256": ""', '"sha256": "abc"', r"version of task-001\.yaml"),
    ],
)
def test_broken_files_and_rows_of_something_else_are_refused(
    lab, file: str, old: str, new: str, said: str
) -> None:
    path = lab.folder / file
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(InputError, match=said):
        validate_torchrec_cpu(lab.root)


@pytest.mark.parametrize(
    "origin",
    [
        Origin("Other CPU, 2 cores, 24 GiB, Linux", "torch 2.13.0, fbgemm 1.8.0"),
        Origin("Made-up CPU, 2 cores, 48 GiB, Linux", "torch 2.13.0, fbgemm 1.8.0"),
        Origin("Made-up CPU, 2 cores, 24 GiB, Linux", "torch 2.12.0, fbgemm 1.8.0"),
    ],
)
def test_a_calibration_of_another_machine_is_refused(lab, origin: Origin) -> None:
    lab.calibration(origin)
    with pytest.raises(InputError, match="never mixed"):
        validate_torchrec_cpu(lab.root)


def test_a_calibration_without_reference_kernels_is_refused(lab) -> None:
    path = lab.folder / "calibration.rows.csv"
    remaining = [line for line in path.read_text().splitlines() if "lookup_backward" not in line]
    path.write_text("\n".join(remaining) + "\n")
    with pytest.raises(InputError, match=r"rows\.csv: the calibration .* 'lookup_backward'"):
        validate_torchrec_cpu(lab.root)


def test_an_empty_folder_asks_for_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["validate", "torchrec-cpu", "--data", str(tmp_path)]) == 2
    assert "holds no task set" in capsys.readouterr().err
    assert app.main(["validate", "torchrec-cpu", "--data", str(tmp_path / "none")]) == 2
    assert "no such directory" in capsys.readouterr().err


def test_fresh_tasks_are_told_apart(
    kept_lab, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [r["what"] for r in table(report, "ranking")][:2] != ["predicted", ranking.FRESH]
    monkeypatch.setattr(
        task_prediction.TaskPrediction, "fresh", property(lambda self: self.task.number == 2)
    )
    found = validate_torchrec_cpu(kept_lab.root)
    fresh = [r for r in table(found, "ranking") if r["what"] == ranking.FRESH]
    assert [(r["tasks"], r["error"]) for r in fresh] == [(1, pytest.approx(1 - 1 / FACTOR))]
    groups = {r["plans"]: r["n"] for r in table(found, "absolute error")}
    assert groups["batches fresh"] == groups["batches developed on"] == 4
    parts = found.by_part()
    assert found.headline == FRESH
    assert [parts[name].n for name in (FRESH, DEVELOPED, UNCORRECTED, ALL)] == [4, 4, 4, 8]
    assert len(found.listed) == 8
