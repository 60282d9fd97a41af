"""`shardopt plan --from PLAN --max-moves K`: tables that are already placed."""

import json
from pathlib import Path
from typing import Any

import pytest

QUICK = ("--effort", 0.005)


def test_json_says_what_moves(run, as_json, model, plan, plan_data: dict[str, Any]) -> None:
    data = as_json("plan", model, "--from", plan, "--max-moves", 1, *QUICK)
    in_use = data["from"]
    assert (in_use["plan"], in_use["max_moves"], in_use["misfits"]) == (str(plan), 1, [])
    assert data["hardware"] == "a100-80gb", "hardware and ranks are those of the plan in use"
    assert data["world_size"] == 2
    before = as_json("predict", model, plan)["predictions"][0]
    assert in_use["iteration_ms"] == pytest.approx(before["iteration_ms"], rel=1e-9)
    best = data["plans"][0]["tables"]
    differ = [
        key
        for key, table in plan_data["tables"].items()
        if any(best[key][field] != value for field, value in table.items())
    ]
    assert in_use["moved"] == differ
    assert len(differ) <= 1
    assert (in_use["moved_bytes"] > 0) <= bool(differ)
    assert data["iteration_ms"] <= in_use["iteration_ms"] * (1 + 1e-9)
    shown = run("plan", model, "--from", plan, "--max-moves", 1, *QUICK).out
    assert "Now " in shown
    assert "no plan that moves 1 table or fewer" in " ".join(shown.split())
    assert max(map(len, shown.splitlines())) <= 100


def test_without_a_plan_in_use_nothing_is_said_of_it(as_json, model: Path) -> None:
    assert "from" not in as_json("plan", model, "--gpus", 2, *QUICK)


def test_no_moves_rate_and_write_the_plan_as_it_is(
    run, model: Path, plan: Path, tmp_path: Path, plan_data: dict[str, Any]
) -> None:
    done = run("plan", model, "--from", plan, "--max-moves", 0, *QUICK, "-o", "same.json")
    assert done.code == 0, done.err
    text = " ".join(done.out.split())
    for words in ("The plan in use", "No table moves.", "Proved: no plan", "Staying is best"):
        assert words in text
    written = json.loads((tmp_path / "same.json").read_text())["tables"]
    for key, table in plan_data["tables"].items():
        assert {field: written[key][field] for field in table} == table


def test_tables_that_changed_since_are_told_and_planned(
    run, as_json, model: Path, plan: Path, plan_data: dict[str, Any]
) -> None:
    plan_data["tables"]["movies"] = plan_data["tables"].pop("items")
    plan.write_text(json.dumps(plan_data))
    done = run("plan", model, "--from", plan, *QUICK)
    assert (done.code, done.err.count("since the plan was made")) == (0, 2)
    data = as_json("plan", model, "--from", plan, "--renamed", "movies=items", *QUICK)
    assert "movies" not in data["plans"][0]["tables"]
    assert data["from"]["misfits"] == []


def test_json_prices_the_move(as_json, model: Path, plan: Path) -> None:
    words = ("plan", model, "--from", plan, *QUICK)
    data = as_json(*words, "--horizon", 10**9)
    move, in_use = data["move"], data["from"]
    assert move["bytes"] == in_use["moved_bytes"] == sum(move["link_bytes"].values())
    assert move["recommended"] == bool(in_use["moved"])
    assert (in_use["horizon"], in_use["max_bytes"]) == (10**9, None)
    if move["recommended"]:
        assert 0 < move["pays_back_after_steps"] <= 10**9
    assert 0 <= move["lower_bound_gain"] < 1
    data = as_json(*words, "--max-gib", 0)
    assert data["move"]["bytes"] == data["from"]["max_bytes"] == 0
