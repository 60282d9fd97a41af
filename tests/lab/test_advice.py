"""Advice that is measured: by turns, resumable, and counted; nothing is run."""

import json
from pathlib import Path
from typing import Any

import pytest

from lab import advice
from lab.advice import AdviceSettings, Checked, measure_advice, summary
from lab.cli import main
from shardopt.bench.job import Job
from shardopt.bench.rows import BenchRows, read_rows, write_rows
from shardopt.bench.run import new_rows
from tests.builders import a_table, a_workload
from tests.lab.validate.reports import a_round


class Ranks:
    """Stand for what runs a job: an iteration takes a microsecond a sample, half with qcomm."""

    def __init__(self) -> None:
        self.order: list[tuple[str, int]] = []

    def run(self, job: Job, path: Path, **_: Any) -> BenchRows:
        self.order.append((path.name.split(".")[1], job.rounds))
        rows = read_rows(path) if path.exists() else new_rows(job)
        about = {"environment": {}, "started": "now", "load": 0.0, "warmup": WARM}
        rows.sessions.append(about)
        ms = 1e-3 * job.workload.batch_size * (0.5 if job.workload.qcomm.forward != "fp32" else 1)
        for number in range(len(rows.rounds), job.rounds):
            times = {"plan": [[ms] * job.block] * job.world_size}
            rows.rounds.append(a_round(number, times, session=len(rows.sessions) - 1))
        write_rows(path, rows)
        return rows


WARM = {"rounds": 1, "settled": True}


def test_models_take_turns_and_go_on_where_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, small = Ranks(), a_workload(a_table("t", rows=1000, dim=8))
    monkeypatch.setattr(advice, "run_bench", ranks.run)
    monkeypatch.setattr(advice, "EFFORT", 0.001)
    monkeypatch.setattr(advice, "draw_model", lambda models, seed: small)
    settings = AdviceSettings(tmp_path / "made", [1], "cpu-gloo", rounds=3)
    by_name = {one.name: one for one in measure_advice(settings, lambda text: None)}
    assert {"qcomm", "batch_size"} <= by_name.keys() <= set(advice.SETTINGS)
    assert by_name["qcomm"].measured == pytest.approx(0.5)
    assert by_name["batch_size"].measured == pytest.approx(0.0)
    assert by_name["qcomm"].noise == 0
    names = {advice.AS_IS, advice.AGAIN, *by_name}
    turns = ranks.order[: len(names)], ranks.order[len(names) :]
    assert [set(turn) for turn in turns] == [{(n, rounds) for n in names} for rounds in (2, 3)]
    assert [name for name, _ in turns[0]] != [name for name, _ in turns[1]]
    stored = json.loads((settings.folder / advice.REPORT).read_text())["rows"]
    assert {row["name"] for row in stored} == set(by_name)
    before = len(ranks.order)
    assert measure_advice(settings, lambda text: None) == list(by_name.values())
    assert len(ranks.order) == before


def test_signs_and_sizes_are_counted_where_they_can_be_told() -> None:
    def one(expected: float, measured: float) -> Checked:
        return Checked(0, "qcomm", None, "bf16", expected, measured, 0.01)

    assert one(0.10, 0.06).sign_right
    assert one(0.10, 0.06).near
    assert not one(0.10, -0.01).sign_right
    assert one(0.02, -0.01).sign_right
    assert not one(0.02, -0.04).near
    *_, signs, sizes = summary([one(0.1, 0.06), one(0.1, -0.01), one(0.02, -0.01)])
    assert "1 of 2" in signs
    assert "2 of 3" in sizes


def test_the_command_names_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advice", str(tmp_path), "--hardware", "no-such-profile"]) == 4
    assert "no-such-profile" in capsys.readouterr().err
