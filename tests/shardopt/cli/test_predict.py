"""`shardopt predict`: given plans, side by side."""

import json
from pathlib import Path
from typing import Any

import pytest

CONTRACT = {"plan", "iteration_ms", "interval_ms", "breakdown", "per_rank", "memory"}


def write(path: Path, data: dict[str, Any], **changes: Any) -> Path:
    path.write_text(json.dumps({**data, **changes}))
    return path


def test_json_holds_the_contract(as_json, model: Path, plan: Path) -> None:
    data = as_json("predict", model, plan)
    (prediction,) = data["predictions"]
    assert prediction.keys() >= CONTRACT
    assert prediction["plan"] == str(plan)
    low, high = prediction["interval_ms"]
    assert 0 < low < prediction["iteration_ms"] < high
    assert sum(prediction["breakdown"].values()) == pytest.approx(prediction["iteration_ms"])
    assert [r["rank"] for r in prediction["per_rank"]] == [0, 1]
    assert prediction["memory"][0].keys() >= {"rank", "hbm_bytes", "hbm_cap_bytes", "ddr_bytes"}


def test_hardware_is_the_plans_unless_a_flag_says_otherwise(as_json, model, plan) -> None:
    for flags, name in (((), "a100-80gb"), (("--hardware", "v100-32gb"), "v100-32gb")):
        assert as_json("predict", model, plan, *flags)["hardware"] == name


def test_hardware_is_the_default_where_the_plan_says_nothing(
    run, model: Path, tmp_path: Path, plan_data: dict[str, Any]
) -> None:
    del plan_data["hardware"]
    done = run("predict", model, write(tmp_path / "p.json", plan_data))
    assert "h100-sxm (default)" in done.out
    assert "h100-sxm, the default" in done.err


def test_several_plans_best_first(
    run, as_json, model: Path, plan: Path, tmp_path: Path, plan_data: dict[str, Any]
) -> None:
    # the same operations, but rank 0 does nearly all of the lookups
    plan_data["tables"]["items"]["shards"][1]["rank"] = 0
    write(tmp_path / "heavy.json", plan_data)
    document = as_json("predict", model, "heavy.json", plan)
    names = [item["plan"] for item in document["predictions"]]
    assert names == ["heavy.json", str(plan)], "in the order given"
    shown = run("predict", model, "heavy.json", "given.json").out
    assert shown.index("given.json") < shown.index("heavy.json"), "best first"
    assert "slower" in shown
    quiet = run("predict", model, "heavy.json", "given.json", "--quiet").out.splitlines()
    assert [line.split(":")[0] for line in quiet] == ["heavy.json", "given.json"]


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({}, "which model file"),
        ({"model": {"name": "old", "sha256": "0" * 64}}, "'old'"),
        ({"batch_size": 64}, "batch size of 64"),
    ],
)
def test_a_plan_of_something_else_is_a_warning(
    run, model: Path, tmp_path: Path, plan_data: dict[str, Any], changes, warning: str
) -> None:
    done = run("predict", model, write(tmp_path / "p.json", plan_data, **changes))
    assert done.code == 0
    assert "shardopt: warning: " in done.err
    assert warning in done.err
    assert "--batch-size" not in run("predict", model, "p.json", "--batch-size", 64).err


def test_a_plan_that_does_not_fit_is_predicted_and_said(run, as_json, model, plan) -> None:
    tight = ("--hbm-gib", 2.1, "--reserve", 0, "--batch-size", 8)
    done = run("predict", model, plan, *tight)
    assert done.code == 0
    # the console wraps where the plan's path ends
    assert "does not fit: rank" in " ".join(done.out.split())
    (prediction,) = as_json("predict", model, plan, *tight)["predictions"]
    assert not all(rank["fits"] for rank in prediction["memory"])


def test_plans_for_different_machines_are_not_compared(
    run, refused, model: Path, plan: Path, tmp_path: Path, plan_data: dict[str, Any]
) -> None:
    of_b200 = write(tmp_path / "p.json", plan_data, hardware="b200")
    refused("predict", model, plan, of_b200, says="flags: --hardware")
    assert run("predict", model, plan, of_b200, "--hardware", "b200").code == 0
