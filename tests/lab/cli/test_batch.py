"""Tasks for real: a calibration and two small ones, one of them twice; random plans train."""

import json
from pathlib import Path

import pytest

from lab.cli import main
from lab.tasks import measure
from lab.tasks.draw import Task
from lab.tasks.models import draw_model
from lab.tasks.plans import plan_of, random_plans, row_wise, table_wise
from shardopt.bench.job import Job
from shardopt.bench.rows import read_rows
from shardopt.bench.run import run_bench
from shardopt.calibrate import points as design
from shardopt.config import load_model
from shardopt.config.write import with_digest
from tests.builders import a_table, a_topology, a_workload

pytest.importorskip("torchrec")
pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def a_task(seed: int, *, world_size: int, local_world_size: int, models: str) -> Task:
    made = with_digest(a_workload(*(a_table(n, 1000 + seed, 8) for n in "ab"), batch_size=16))
    topology = a_topology(world_size, local_world_size)
    shardings = {
        "whole": tuple(table_wise(t, rank) for rank, t in enumerate(made.tables)),
        "split": tuple(row_wise(t, world_size) for t in made.tables),
    }
    plans = {name: plan_of(made, topology, plan) for name, plan in shardings.items()}
    return Task(seed, f"task-{seed:03d}", made, plans)


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
    """What the planners are compared on runs, weighted features and sequences included."""
    model = draw_model("shapes", seed).with_batch_size(16)
    plans = random_plans(seed, model, a_topology(), 4)
    rows = run_bench(Job(model, plans, rounds=1, block=1, warmup=0))
    assert rows is not None
    assert rows.names == list(plans)
    assert len(rows.rounds) == 1
