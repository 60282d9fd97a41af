"""`shardopt predict`: given plans, side by side."""

import json
from pathlib import Path
from typing import Any

import pytest

CONTRACT = {"plan", "iteration_ms", "interval_ms", "breakdown", "per_rank", "memory"}


@pytest.fixture
def plan(tmp_path: Path, plan_data: dict[str, Any]) -> Path:
    path = tmp_path / "given.json"
    path.write_text(json.dumps(plan_data))
    return path


def write(path: Path, data: dict[str, Any], **changes: Any) -> Path:
    path.write_text(json.dumps({**data, **changes}))
    return path


def test_json_holds_the_contract(run, model: Path, plan: Path) -> None:
    done = run("predict", model, plan, "--json")
    assert done.code == 0, done.err
    data = json.loads(done.out)
    (prediction,) = data["predictions"]
    assert prediction.keys() >= CONTRACT
    assert prediction["plan"] == str(plan)
    low, high = prediction["interval_ms"]
    assert 0 < low < prediction["iteration_ms"] < high
    assert sum(prediction["breakdown"].values()) == pytest.approx(prediction["iteration_ms"])
    assert [r["rank"] for r in prediction["per_rank"]] == [0, 1]
    assert prediction["memory"][0].keys() >= {"rank", "hbm_bytes", "hbm_cap_bytes", "ddr_bytes"}


def test_hardware_is_the_plans_unless_a_flag_says_otherwise(run, model: Path, plan: Path) -> None:
    assert json.loads(run("predict", model, plan, "--json").out)["hardware"] == "a100-80gb"
    other = run("predict", model, plan, "--json", "--hardware", "v100-32gb").out
    assert json.loads(other)["hardware"] == "v100-32gb"


def test_hardware_is_the_default_where_the_plan_says_nothing(
    run, model: Path, tmp_path: Path, plan_data: dict[str, Any]
) -> None:
    del plan_data["hardware"]
    done = run("predict", model, write(tmp_path / "p.json", plan_data))
    assert "h100-sxm (default)" in done.out
    assert "h100-sxm, the default" in done.err


def test_several_plans_best_first(
    run, model: Path, plan: Path, tmp_path: Path, plan_data: dict[str, Any]
) -> None:
    # the same operations, but rank 0 does nearly all of the lookups
    plan_data["tables"]["items"]["shards"][1]["rank"] = 0
    write(tmp_path / "heavy.json", plan_data)
    done = run("predict", model, "heavy.json", plan, "--json")
    names = [item["plan"] for item in json.loads(done.out)["predictions"]]
    assert names == ["heavy.json", str(plan)], "in the order given"
    shown = run("predict", model, "heavy.json", "given.json").out
    assert shown.index("given.json") < shown.index("heavy.json"), "best first"
    assert "slower" in shown
    quiet = run("predict", model, "heavy.json", "given.json", "--quiet").out.splitlines()
    assert [line.split(":")[0] for line in quiet] == ["heavy.json", "given.json"]


def test_unknown_model_is_a_warning(run, model: Path, plan: Path) -> None:
    done = run("predict", model, plan, "--quiet")
    assert done.code == 0
    assert done.err.startswith("shardopt: warning: ")
    assert "does not say which model file" in done.err


def test_other_model_is_a_warning(
    run, model: Path, tmp_path: Path, plan_data: dict[str, Any]
) -> None:
    given = write(tmp_path / "p.json", plan_data, model={"name": "old", "sha256": "0" * 64})
    done = run("predict", model, given)
    assert done.code == 0
    assert "another version of the model: 'old'" in done.err


def test_other_batch_size_is_a_warning(
    run, model: Path, tmp_path: Path, plan_data: dict[str, Any]
) -> None:
    given = write(tmp_path / "p.json", plan_data, batch_size=64)
    assert "a batch size of 64 predicts" in run("predict", model, given).err
    assert "--batch-size" not in run("predict", model, given, "--batch-size", 64).err


def test_a_plan_that_does_not_fit_is_predicted_and_said(run, model: Path, plan: Path) -> None:
    tight = ("--hbm-gib", 2.1, "--reserve", 0, "--batch-size", 8)
    done = run("predict", model, plan, *tight)
    assert done.code == 0
    # the console wraps where the plan's path ends
    assert "does not fit: rank" in " ".join(done.out.split())
    memory = json.loads(run("predict", model, plan, "--json", *tight).out)["predictions"][0][
        "memory"
    ]
    assert not all(rank["fits"] for rank in memory)


def test_world_size_that_disagrees(run, model: Path, plan: Path, tmp_path: Path) -> None:
    done = run("predict", model, plan, "--gpus", 4)
    assert (done.code, done.out) == (2, "")
    assert "the machine has 4 ranks" in done.err
    (tmp_path / "c.yaml").write_text("schema: 1\nhosts: 1\nranks_per_host: 4\n")
    done = run("predict", model, plan, "--cluster", "c.yaml")
    assert done.code == 2
    assert "the cluster file c.yaml has 4 ranks" in done.err


def test_plans_for_different_machines_are_not_compared(
    run, model: Path, plan: Path, tmp_path: Path, plan_data: dict[str, Any]
) -> None:
    other = write(tmp_path / "p.json", plan_data, hardware="b200")
    done = run("predict", model, plan, other)
    assert done.code == 2
    assert "flags: --hardware" in done.err
    assert run("predict", model, plan, other, "--hardware", "b200").code == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "JSON object"),
        ('{"schema": "shardopt.plan/1", "world_size": 2}', "'tables' is missing"),
    ],
)
def test_bad_plan_files(run, model: Path, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    done = run("predict", model, "bad.json")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("shardopt: error: bad.json")
    assert words in done.err


def test_missing_plan_and_missing_table(
    run, model: Path, tmp_path: Path, plan_data: dict[str, Any]
) -> None:
    done = run("predict", model, "none.json")
    assert (done.code, "none.json: no such file" in done.err) == (2, True)
    del plan_data["tables"]["days"]
    done = run("predict", model, write(tmp_path / "p.json", plan_data))
    assert (done.code, "days" in done.err) == (2, True)
