"""`python -m lab validate`: JSON, console, the page, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.cli import main
from lab.tasks import measure
from lab.tasks.against import Task
from lab.tasks.models import draw_model
from lab.tasks.plans import plan_of, random_plans, row_wise, table_wise
from lab.tasks.task_set import TaskSet
from lab.validate.gemm import GEMM_FILE
from shardopt.bench.job import Job
from shardopt.bench.rows import read_rows
from shardopt.bench.run import run_bench
from shardopt.calibrate import points as design
from shardopt.config import load_model
from shardopt.config.write import with_digest
from tests.builders import a_table, a_topology, a_workload
from tests.public_data import EXCERPTS

GEMM = (
    "split,device,B,M,N,K,latency_ms,kernel\n"
    "test,NVIDIA A100-PCIE-40GB,1,4096,4096,4096,9.0,k\n"
    "test,NVIDIA L4,1,4096,4096,4096,20.0,k\n"
    "test,NVIDIA L4,1,4096,4096,x,20.0,k\n"
)


def test_the_console_shows_platforms_and_what_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    (tmp_path / GEMM_FILE).write_text(GEMM)
    assert main(["validate", "gemm", "--data", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "NVIDIA A100-PCIE-40GB" in text
    assert "1 row left out" in text


def test_torchrec_rows_and_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "accuracy.md"
    words = ["validate", "torchrec-p4d", "--data", str(EXCERPTS), "--write-docs", str(page)]
    assert main([*words, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert row["local_batch"] == 16384
    text = (tmp_path / "accuracy" / "torchrec-p4d.csv").read_text()
    assert "## torchrec-p4d" in page.read_text()
    assert "mlcommons/training" in text
    assert f"{row['predicted_ms']:.4g}" in text


pytest.importorskip("torchrec")
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def a_task(seed: int, task_set: TaskSet, models: str, count: int) -> Task:
    topology = task_set.ranks
    world_size = topology.world_size
    model = with_digest(a_workload(*(a_table(n, 1000 + seed, 8) for n in "ab"), batch_size=16))
    shardings = {
        "whole": tuple(table_wise(t, rank) for rank, t in enumerate(model.tables)),
        "split": tuple(row_wise(t, world_size) for t in model.tables),
    }
    plans = {name: plan_of(model, topology, plan) for name, plan in shardings.items()}
    return model, plans


def test_a_batch_of_two_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(measure, "draw_task", a_task)
    monkeypatch.setattr(design, "QUICK", design.TINY)
    folder = tmp_path / "batch"
    words = ["batch", str(folder), "--tasks", "0-1", "--repeat", "1", "--block", "2"]
    assert main([*words, "--rounds", "1"]) == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        "batch.json",
        "calibration.rows.csv",
        "task-000.rows.json",
        "task-000.yaml",
        "task-001.again.rows.json",
        "task-001.rows.json",
        "task-001.yaml",
    ]
    assert json.loads((folder / "batch.json").read_text())["tasks"] == [0, 1]
    before = (folder / "task-000.rows.json").read_text()
    assert main([*words, "--rounds", "1"]) == 0
    assert (folder / "task-000.rows.json").read_text() == before
    assert main([*words, "--rounds", "2"]) == 0
    rows = read_rows(folder / "task-000.rows.json")
    assert [(r["round"], r["session"]) for r in rows.rounds] == [(0, 0), (1, 1)]
    assert rows.model["sha256"] == load_model(folder / "task-000.yaml").sha256
    text = (folder / "task-000.rows.json").read_text()
    assert "null" not in "".join(line for line in text.splitlines() if '"plan"' in line)


@pytest.mark.parametrize("seed", [3, 4], ids=["weighted", "sequences"])
def test_random_plans_of_a_drawn_model_train(seed: int) -> None:
    """Models that planners are compared on train, with weighted features and sequences."""
    model = draw_model("shapes", seed).with_batch_size(16)
    plans = random_plans(seed, model, a_topology(), 4)
    rows = run_bench(Job(model, plans, rounds=1, block=1, warmup=0))
    assert rows is not None
    assert rows.names == list(plans)
    assert len(rows.rounds) == 1


SUITE = """\
schema: 1
torchrec_limit_s: 30
variant_limit_s: 30
rival_limit_s: 10
instances:
  - {tables: 5, gpus: 2, fill: 0.5, seeds: [1]}
"""


@pytest.mark.slow
def test_a_suite_is_run_and_taken_up_again(run, tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    suite, rows = tmp_path / "s.yaml", tmp_path / "r.csv"
    suite.write_text(SUITE)
    words = ("search", suite, "-o", rows, "--effort", 0.05)
    first_run = run(*words, "--planners", "torchrec,neuroshard")
    assert first_run.code == 0, first_run.err
    assert "2 of 2: 5x2-fill50-1, neuroshard" in first_run.err
    done = run(*words)
    assert done.code == 0, done.err
    assert "1 of 8: 5x2-fill50-1, torchrec dynamic" in done.err
    assert "by TorchRec's rating" in done.out
    assert rows.read_text().count("5x2-fill50-1") == 10
    before = rows.read_bytes()
    again = run(*words, "--quiet")
    assert (again.code, again.err) == (0, "")
    assert rows.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("s.yaml",), "-o"),
        (("s.yaml", "-o", "r.csv", "--planners", "torchrek"), "did you mean 'torchrec'"),
        (("none.yaml", "-o", "r.csv"), "none.yaml: no such instances file"),
    ],
)
def test_bad_flags_of_a_suite(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[object, ...], told: str
) -> None:
    pytest.importorskip("torchrec")
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(SUITE)
    done = run("search", *words)
    assert (done.code, done.out) == (2, "")
    assert told in done.err
