"""`shardopt plan --tune`: the report, the JSON, the plan file, storages that cannot be used."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from predictor.model.plan_json import load_plan
from search.tune import tune
from shardopt.cli.tune.run import time_left

QUICK = ("--gpus", 2, "--effort", 0.005, "--trials", 3)
KNOBS = ("--tune", "batch_size=8192/32768,pipeline=base/sparse_dist")

CONTRACT = {
    "iteration_ms",
    "lower_bound_ms",
    "gap",
    "surrogate_gap",
    "stopped_by",
    "world_size",
    "hardware",
    "provenance",
    "search_seconds",
    "plans",
    "baselines",
}


def test_json_keeps_the_contract_and_adds_the_tuning(run, model: Path) -> None:
    done = run("plan", model, *QUICK, *KNOBS, "--json", "-o", "p.json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found.keys() >= CONTRACT
    tuned = found["tune"]
    assert [t["number"] for t in tuned["trials"]] == [0, 1, 2]
    assert tuned["trials"][0]["setting"] == {"batch_size": 32768, "pipeline": "base"}
    assert tuned["front"] == [tuned["best"]]
    best = tuned["best"]
    assert best["iteration_ms"] == pytest.approx(found["iteration_ms"], rel=1e-9)
    assert found["batch_size"] == best["setting"]["batch_size"]
    per_thousand = 1000 * found["iteration_ms"] / (2 * found["batch_size"])
    assert best["objectives"] == {"time": pytest.approx(per_thousand)}
    searched = [t["objectives"]["time"] for t in tuned["trials"] if t["objectives"]]
    assert per_thousand <= min(searched) * (1 + 1e-9)
    written = load_plan("p.json")
    assert written.meta["batch_size"] == found["batch_size"]
    assert written.meta["tuned"] == best["setting"]


@pytest.mark.parametrize("quiet", [(), ("--quiet",)], ids=["report", "headline"])
def test_one_setting_is_not_called_the_best(run, model: Path, quiet) -> None:
    told = {}
    for trials in (1, 2):
        done = run("plan", model, *QUICK[:-1], trials, *KNOBS, *quiet)
        assert done.code == 0, done.err
        told[trials] = done.out.lower()
    assert "only setting tried" in told[1]
    assert "best setting" not in told[1]
    assert "best setting" in told[2]


def test_predict_agrees_with_the_plan_that_was_written(run, model: Path) -> None:
    """Once the model file has the best setting."""
    knobs = ("--tune", "batch_size=65536,pipeline=sparse_dist,qcomm=bf16,bucket=5")
    done = run("plan", model, *QUICK, *knobs, "-o", "p.json", "--json")
    assert done.code == 0, done.err
    changed = "batch_size: 65536\ntrain_pipeline: sparse_dist\n"
    changed += "qcomm: {forward: bf16, backward: bf16}"
    text = model.read_text().replace("batch_size: 32768", changed)
    model.write_text(text.replace("dense:\n", "dense:\n  bucket_cap_mb: 5\n"))
    again = run("predict", model, "p.json", "--json")
    assert again.code == 0, again.err
    predicted = json.loads(again.out)["predictions"][0]["iteration_ms"]
    assert predicted == pytest.approx(json.loads(done.out)["iteration_ms"], rel=1e-9)


@pytest.mark.slow
def test_the_report_says_what_to_change(run, model: Path) -> None:
    done = run("plan", model, *QUICK, "--tune", "batch_size=512/65536,pipeline,qcomm=bf16")
    assert done.code == 0, done.err
    text = " ".join(done.out.split())
    for words in (
        "Trials",
        "of 6 settings tried (the number of trials asked for)",
        "Best setting",
        "batch_size: 65536 in the model file",
        "131,072 samples per iteration instead of 65,536",
        "qcomm: {forward: bf16, backward: bf16} in the model file",
        "65,536 per GPU",
    ):
        assert words in text
    assert done.err == ""


@pytest.mark.slow
def test_a_front_lists_its_members(run, model: Path) -> None:
    done = run(
        "plan", model, *QUICK, "--tune", "batch_size=512/65536", "--objectives", "time,memory"
    )
    assert done.code == 0, done.err
    assert "Pareto front" in done.out
    assert "GiB on a rank" in done.out


@pytest.mark.slow
def test_one_command_after_another_shares_a_study(run, model: Path) -> None:
    words = ("plan", model, *QUICK, *KNOBS, "--json", "--storage", "tune.journal")
    first, again = run(*words), run(*words)
    assert (first.code, again.code) == (0, 0), first.err + again.err
    assert "study 'shardopt-small-" in again.err
    one, two = (json.loads(done.out)["tune"] for done in (first, again))
    assert one["trials"] == two["trials"]
    other = run(*words, "--study", one["study"], "--seed", 1)
    assert other.code == 2
    assert "seed is 0 there, 1 here" in other.err


def test_interrupted(run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = tune.try_setting, 0

    def interrupted(*given: object) -> object:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(tune, "try_setting", interrupted)
    done = run("plan", model, *QUICK, *KNOBS, "-o", "p.json")
    assert done.code == 130
    assert "tried (interrupted)" in done.out
    assert load_plan("p.json").meta["batch_size"] == 32768
    assert done.err.endswith("interrupted\n")


def a_closed_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.mark.parametrize(
    ("storage", "says"),
    [
        ("tune.txt", "storage is 'tune.txt'; give a database such as postgresql://"),
        ("journal:", "storage names no file"),
        ("no/such/tune.log", "there is no directory no/such"),
        ("journal:.", "is a directory"),
        ("mysqlx://u@127.0.0.1/x", "'mysqlx' is no kind of database; give a database such as"),
        ("sqlite:////no/such/tune.db", "the storage cannot be used: unable to open"),
        ("http://x", "http://x"),
        ("model.yaml.log", "is no Optuna journal"),
    ],
)
def test_storages_that_cannot_be_used(run, model: Path, storage: str, says: str) -> None:
    Path("model.yaml.log").write_text(model.read_text())
    done = run("plan", model, *QUICK, *KNOBS, "--storage", storage)
    assert (done.code, done.out) == (2, "")
    assert says in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg2"])
def test_a_server_that_is_down(run, model: Path, scheme: str) -> None:
    pytest.importorskip("psycopg2", reason="the PostgreSQL driver psycopg2 is not installed")
    url = f"{scheme}://me:secret@127.0.0.1:{a_closed_port()}/x"
    done = run("plan", model, *QUICK, *KNOBS, "--storage", url)
    assert done.code == 2
    assert "onnection refused" in done.err
    assert "secret" not in done.err
    assert len(done.err.splitlines()) == 1


def test_the_time_that_is_left_goes_by_the_pace_so_far() -> None:
    assert time_left((0.0, 0), (0.0, 0), 24) == ""
    assert time_left((100.0, 4), (130.0, 10), 24) == ", about 70 s left"
