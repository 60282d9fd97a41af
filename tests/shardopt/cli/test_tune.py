"""`shardopt plan --tune`: flags, report, JSON, plan file, storages that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.errors import InputError
from predictor.model.plan_json import load_plan
from search.tune import tune
from search.tune.knobs import KNOBS as ALL_KNOBS
from shardopt.api.request import PlanRequest
from shardopt.cli.tune import MAX_VALUES, TuneFlags, read_goals, read_knobs, time_left
from tests.shardopt.cli.test_plan import CONTRACT

QUICK = ("--gpus", 2, "--effort", 0.005, "--trials", 2)
KNOBS = ("--tune", "batch_size=8192/32768,pipeline=base/sparse_dist")


def test_json_keeps_the_contract_and_adds_the_tuning(as_json, model: Path) -> None:
    document = as_json("plan", model, *QUICK, *KNOBS, "-o", "p.json")
    assert document.keys() >= CONTRACT
    tuned = document["tune"]
    assert [t["number"] for t in tuned["trials"]] == [0, 1]
    assert tuned["trials"][0]["setting"] == {"batch_size": 32768, "pipeline": "base"}
    assert tuned["front"] == [tuned["best"]]
    best = tuned["best"]
    assert best["iteration_ms"] == pytest.approx(document["iteration_ms"], rel=1e-9)
    assert document["batch_size"] == best["setting"]["batch_size"]
    per_thousand = 1000 * document["iteration_ms"] / (2 * document["batch_size"])
    assert best["objectives"] == {"time": pytest.approx(per_thousand)}
    searched = [t["objectives"]["time"] for t in tuned["trials"] if t["objectives"]]
    assert per_thousand <= min(searched) * (1 + 1e-9)
    written = load_plan("p.json")
    assert written.meta["batch_size"] == document["batch_size"]
    assert written.meta["tuned"] == best["setting"]


def test_predict_agrees_with_the_plan_that_was_written(as_json, model: Path) -> None:
    """Once the model file has the best setting."""
    knobs = ("--tune", "batch_size=65536,pipeline=sparse_dist,qcomm=bf16,bucket=5")
    document = as_json("plan", model, *QUICK, *knobs, "-o", "p.json")
    changed = "batch_size: 65536\ntrain_pipeline: sparse_dist\n"
    changed += "qcomm: {forward: bf16, backward: bf16}"
    text = model.read_text().replace("batch_size: 32768", changed)
    model.write_text(text.replace("dense:\n", "dense:\n  bucket_cap_mb: 5\n"))
    predicted = as_json("predict", model, "p.json")["predictions"][0]["iteration_ms"]
    assert predicted == pytest.approx(document["iteration_ms"], rel=1e-9)


@pytest.mark.slow
def test_one_command_after_another_shares_a_study(run, refused, model: Path) -> None:
    words = ("plan", model, *QUICK, *KNOBS, "--json", "--storage", "tune.journal")
    first, again = run(*words), run(*words)
    assert (first.code, again.code) == (0, 0), first.err + again.err
    assert "shardopt-small-" in again.err
    first_tuning, second_tuning = (json.loads(done.out)["tune"] for done in (first, again))
    assert first_tuning["trials"] == second_tuning["trials"]
    refused(*words, "--study", first_tuning["study"], "--seed", 1, says="seed")


def test_interrupted(run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, count = tune.try_setting, 0

    def interrupted(*arguments: object) -> object:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(tune, "try_setting", interrupted)
    done = run("plan", model, *QUICK, *KNOBS, "-o", "p.json")
    assert done.code == 130
    assert "interrupted" in done.out
    assert load_plan("p.json").meta["batch_size"] == 32768
    assert done.err.endswith("interrupted\n")


def test_the_time_that_is_left_goes_by_the_pace_so_far() -> None:
    assert time_left((0.0, 0), (0.0, 0), 24) == ""
    assert time_left((100.0, 4), (130.0, 10), 24) == ", about 70 s left"


# --- the texts of --tune and --objectives


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("batch_size=2048:16384", (2048, 4096, 8192, 16384)),
        ("batch_size=3:16", (3, 6, 12, 16)),
        ("batch_size=4096:16384:4096", (4096, 8192, 12288, 16384)),
        ("batch_size=100:250:100", (100, 200, 250)),
        ("batch_size=512/64", (64, 512)),
        ("hosts=4", (4,)),
        ("cache_ratio=0.1:0.3:0.1", (0.1, 0.2, 0.3)),
        ("bucket=12.5:50", (12.5, 25.0, 50.0)),
        ("qcomm=fp32/bf16", ("fp32", "bf16")),
    ],
)
def test_values(text: str, values: tuple[Any, ...]) -> None:
    name = text.partition("=")[0]
    knobs = read_knobs(text)
    assert knobs == {name: values}
    assert [type(v) for v in knobs[name] or ()] == [ALL_KNOBS[name][0].kind] * len(values)


def test_several_knobs_and_their_defaults() -> None:
    knobs = read_knobs("batch_size=64:128, qcomm ,pipeline=base/sparse_dist")
    expected = {"batch_size": (64, 128), "qcomm": None, "pipeline": ("base", "sparse_dist")}
    assert knobs == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("batchsize", "batchsize"),
        ("", "knob ''"),
        ("qcomm,,hosts", "knob ''"),
        ("batch_size,batch_size=3", "batch_size"),
        ("batch_size=", "''"),
        ("qcomm=", "qcomm"),
        ("batch_size=2k", "2k"),
        ("batch_size=1.5:4", "1.5"),
        ("cache_ratio=nan", "nan"),
        ("bucket=1:inf", "inf"),
        ("batch_size=8:4", "8:4"),
        ("batch_size=0:4", "0:4"),
        ("batch_size=1:4:0", "1:4:0"),
        ("batch_size=1:4:1:1", "1:4:1:1"),
        ("batch_size=1:1000:1", "1000 values"),
        ("batch_size=4/8/4", "4/8/4"),
    ],
)
def test_what_cannot_be_read(text: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        read_knobs(text)


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 10**5) | st.none())
def test_a_range_begins_and_ends_where_it_says(low: int, more: int, step: int | None) -> None:
    high = low + more
    text = f"batch_size={low}:{high}" + ("" if step is None else f":{step}")
    try:
        values = read_knobs(text)["batch_size"]
    except InputError:
        assert step is not None
        assert more / step > MAX_VALUES - 2
        return
    assert values is not None
    assert (values[0], values[-1]) == (low, high)
    assert list(values) == sorted(set(values), key=float)


def test_objectives() -> None:
    names = [goal.name for goal in read_goals("memory,time", {})]
    assert names == ["memory", "time"]
    assert [g.name for g in read_goals(None, {"batch_size": None})] == ["time"]
    assert [g.name for g in read_goals(None, {"hosts": None})] == ["gpu_hours"]
    for wrong in ("tim", "time,time", ""):
        with pytest.raises(InputError, match="--objectives"):
            read_goals(wrong, {})


@pytest.mark.parametrize(
    ("flags", "request_", "says"),
    [
        ({"trials": 3}, {}, "--trials"),
        ({"storage": "a.log"}, {}, "--storage"),
        ({"tune": "qcomm", "trials": 0}, {}, "trials is 0"),
        ({"tune": "qcomm", "study": "s"}, {}, "--study"),
        ({"tune": "qcomm", "study": "", "storage": "a.log"}, {}, "--study is empty"),
        ({"tune": "qcomm"}, {"from_": Path("plan.json")}, "--from"),
        ({"tune": "qcomm"}, {"objective": "regret"}, "--objective"),
        ({"tune": "qcomm"}, {"scenarios": "none"}, "--scenarios"),
        ({"tune": "qcomm"}, {"stats": "mon.npz,tue.npz"}, "--stats"),
    ],
)
def test_flags_that_do_not_go_together(
    flags: dict[str, Any], request_: dict[str, Any], says: str
) -> None:
    with pytest.raises(InputError, match=says):
        TuneFlags(**flags).check(PlanRequest(**request_))
