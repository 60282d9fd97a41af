"""`shardopt plan` twice: from the cache, and made again from its plan file."""

import json
import os
from pathlib import Path

import pytest

from predictor.model.plan_json import plan_text

QUICK = ("--gpus", 2, "--effort", 0.005)
KEPT = "the answer to the same input is kept"


def test_the_second_call_prints_the_same(
    run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    first = run("plan", model, *QUICK)
    second = run("plan", model, *QUICK, "-o", "plan.json")
    assert KEPT not in first.err
    assert KEPT in second.err
    cut = first.out.index("Next:") - 80
    assert first.out[:cut] == second.out[:cut]


def test_a_plan_file_is_made_again(run, refused, model: Path, tmp_path: Path) -> None:
    run("plan", model, *QUICK, "-o", "plan.json")
    made_by = json.loads((tmp_path / "plan.json").read_text())["made_by"]
    assert made_by["settings"] == {"model": str(model), "gpus": 2, "effort": 0.005}
    assert set(made_by["inputs"]) == {"model", "hardware", "ranks"}
    done = run("plan", "--replay", "plan.json")
    assert (done.code, done.out) == (0, "plan.json: made again, byte for byte\n"), done.err
    moved = model.rename(tmp_path / "moved.yaml")
    refused("plan", "--replay", "plan.json", says="no such model file")
    refused("plan", "--replay", "plan.json", "--seed", 1, says="--seed")
    done = run("plan", moved, "--replay", "plan.json", "--json")
    assert json.loads(done.out) == {"plan": "plan.json", "same": True, "differs": []}


def test_what_differs_is_named(run, model: Path, tmp_path: Path) -> None:
    run("plan", model, *QUICK, "-o", "plan.json")
    plan = tmp_path / "plan.json"
    data = json.loads(plan.read_text())
    data["made_by"]["versions"]["numpy"] = "0.1"
    data["tables"]["days"]["shards"].reverse()
    plan.write_text(json.dumps(data))
    model.write_text(model.read_text().replace("pooling_factor: 20", "pooling_factor: 21"))
    done = run("plan", "--replay", "plan.json", "--json")
    assert done.code == 2
    assert not json.loads(done.out)["same"]
    for word in ("model differ", "numpy was 0.1", "iteration_ms was", "model was"):
        assert word in done.err


def test_settings_that_no_option_has_are_told_and_left_out(run, model: Path, tmp_path) -> None:
    run("plan", model, *QUICK, "-o", "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    data["made_by"]["settings"]["--gpus-per-nod"] = 1
    (tmp_path / "plan.json").write_text(plan_text(data))
    done = run("plan", "--replay", "plan.json")
    assert done.code == 0, done.err
    assert "--gpus-per-nod" in done.err


def test_a_plan_file_that_names_a_fifo_is_not_waited_for(refused, tmp_path, plan_data) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name in ("model", "cluster", "hardware", "scenarios", "stats", "from"):
        settings = {"model": "m.yaml", "gpus": 2, name: "./fifo"}
        document = {**plan_data, "made_by": {"settings": settings}}
        (tmp_path / "plan.json").write_text(json.dumps(document))
        refused("plan", "--replay", "plan.json", says="fifo")
