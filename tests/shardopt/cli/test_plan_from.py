"""`shardopt plan --from PLAN --max-moves K`: tables that are already placed."""

import json
from pathlib import Path
from typing import Any

import pytest

QUICK = ("--effort", 0.005)


@pytest.fixture
def in_use(tmp_path: Path, plan_data: dict[str, Any]) -> Path:
    path = tmp_path / "in_use.json"
    path.write_text(json.dumps(plan_data))
    return path


def test_json_says_what_moves(run, model: Path, in_use: Path, plan_data: dict[str, Any]) -> None:
    done = run("plan", model, "--from", in_use, "--max-moves", 1, *QUICK, "--json")
    assert done.code == 0, done.err
    data = json.loads(done.out)
    found = data["from"]
    assert (found["plan"], found["max_moves"], found["misfits"]) == (str(in_use), 1, [])
    assert data["hardware"] == "a100-80gb", "hardware and ranks are those of the plan in use"
    assert data["world_size"] == 2
    before = json.loads(run("predict", model, in_use, "--json").out)["predictions"][0]
    assert found["iteration_ms"] == pytest.approx(before["iteration_ms"], rel=1e-9)
    best = data["plans"][0]["tables"]
    differ = [
        key
        for key, table in plan_data["tables"].items()
        if any(best[key][field] != value for field, value in table.items())
    ]
    assert found["moved"] == differ
    assert len(differ) <= 1
    assert (found["moved_bytes"] > 0) <= bool(differ)
    assert data["iteration_ms"] <= found["iteration_ms"] * (1 + 1e-9)


def test_without_a_plan_in_use_nothing_is_said_of_it(run, model: Path) -> None:
    assert "from" not in json.loads(run("plan", model, "--gpus", 2, *QUICK, "--json").out)


def test_no_moves_rate_and_write_the_plan_as_it_is(
    run, model: Path, in_use: Path, tmp_path: Path, plan_data: dict[str, Any]
) -> None:
    done = run("plan", model, "--from", in_use, "--max-moves", 0, "-o", "same.json")
    assert done.code == 0, done.err
    text = " ".join(done.out.split())
    assert "The plan in use" in text
    assert "No table moves." in text
    assert "Proved: no plan is predicted to be faster than" in text
    written = json.loads((tmp_path / "same.json").read_text())["tables"]
    for key, table in plan_data["tables"].items():
        assert {field: written[key][field] for field in table} == table


def test_the_report_names_the_tables(run, model: Path, in_use: Path) -> None:
    done = run("plan", model, "--from", in_use, "--max-moves", 2, *QUICK)
    assert done.code == 0, done.err
    text = " ".join(done.out.split())
    assert "Now " in text
    assert "no plan that moves 2 tables or fewer is predicted to be faster" in text
    assert max(map(len, done.out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--gpus", 2, "--max-moves", 1), "flags: --max-moves, --from"),
        (("--from", "in_use.json", "--max-moves", -1), "max_moves is -1"),
        (("--gpus", 2, "--horizon", 5), "flags: --horizon, --from"),
        (("--from", "in_use.json", "--max-gib", "nan"), "max_gib is nan"),
        (("--from", "in_use.json", "--horizon", 0), "horizon is 0"),
        (("--from", "nowhere.json"), "nowhere.json: no such file"),
        (("--from", "in_use.json", "--gpus", 4), "the plan places its shards on 2"),
    ],
)
def test_bad_flags(run, model: Path, in_use: Path, flags: tuple[object, ...], words: str) -> None:
    done = run("plan", model, *flags)
    assert (done.code, done.out) == (2, "")
    assert words in done.err
    assert "Traceback" not in done.err


def test_the_plan_in_use_is_not_overwritten(run, model: Path, in_use: Path) -> None:
    done = run("plan", model, "--from", in_use, "-o", in_use)
    assert done.code == 2
    assert "is an input of this command" in done.err


def test_a_plan_of_another_model(run, model: Path, in_use: Path, plan_data: dict[str, Any]) -> None:
    plan_data["tables"]["movies"] = plan_data["tables"].pop("items")
    in_use.write_text(json.dumps(plan_data))
    done = run("plan", model, "--from", in_use)
    assert done.code == 2
    assert "in_use.json: table 'movies' is not in small" in done.err


def test_too_few_moves(run, model: Path, in_use: Path) -> None:
    model.write_text(
        model.read_text().replace(
            "embedding_dim: 64", "embedding_dim: 64\n    constraints: {ranks: [1]}", 1
        )
    )
    done = run("plan", model, "--from", in_use, "--max-moves", 0)
    assert (done.code, done.out) == (3, "")
    assert "table 'users' cannot stay: constraints.ranks allows 1" in done.err
    assert "at least 1 must" in done.err
    assert "allow 1 move\n  flags: --max-moves\n" in done.err


def test_json_prices_the_move(run, model: Path, in_use: Path) -> None:
    done = run("plan", model, "--from", in_use, "--horizon", 10**9, *QUICK, "--json")
    data = json.loads(done.out)
    move, given = data["move"], data["from"]
    assert move["bytes"] == given["moved_bytes"] == sum(move["link_bytes"].values())
    assert move["recommended"] == bool(given["moved"])
    assert (given["horizon"], given["max_bytes"]) == (10**9, None)
    if move["recommended"]:
        assert 0 < move["pays_back_after_steps"] <= 10**9
    assert 0 <= move["lower_bound_gain"] < 1


def test_no_bytes_may_move(run, model: Path, in_use: Path) -> None:
    data = json.loads(run("plan", model, "--from", in_use, "--max-gib", 0, *QUICK, "--json").out)
    assert data["move"]["bytes"] == 0
    assert data["from"]["max_bytes"] == 0


def test_staying_is_said_to_be_best_with_a_proof(run, model: Path, in_use: Path) -> None:
    done = run("plan", model, "--from", in_use, "--max-moves", 0, *QUICK)
    text = " ".join(done.out.split())
    assert "Staying is best: proved, no plan within the limits gains more than" in text
