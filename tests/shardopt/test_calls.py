"""Calls by Python users, with a module, statistics of data, and bad input."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torchrec")

import shardopt
import shardopt.explain.waits
import shardopt.plan
from predictor.errors import InputError
from shardopt.config import load_model
from tests.shardopt.api.windows import write_window
from tests.shardopt.conftest import MODEL
from tests.shardopt.torchrec.hook_models import Model, bag

QUICK = {"effort": 0.005, "scenarios": "none", "cache": False, "batch_size": 512}


def test_functions_keep_their_names_beside_modules() -> None:
    assert callable(shardopt.plan)
    assert callable(shardopt.explain)
    assert dir(shardopt) == sorted(shardopt.__all__)


def test_a_module_is_captured_at_the_lengths_of_its_data(tmp_path: Path) -> None:
    stats = write_window(tmp_path / "data.npz", 7.0, names=("a_f0", "label"), rows=10_000)
    path = tmp_path / "model.yaml"
    module = Model(bag("a"))
    workload = shardopt.to_yaml(module, path, batch_size=512, stats=stats)
    assert workload.sha256 == load_model(path).sha256
    (feature,) = workload.tables[0].features
    assert feature.pooling_factor == 7.0
    assert type(feature.distribution).__name__.startswith("Empirical")
    found = shardopt.plan(module, gpus=2, stats=stats, **QUICK)
    found.save(tmp_path / "plan.json")
    assert "model" not in shardopt.load_plan(tmp_path / "plan.json").meta["made_by"]["settings"]
    for one in found.to_dict()["deciding"]:
        assert re.fullmatch(r"shardopt calibrate( --[a-z]+ [a-z]+)*", one["command"])
    direct = shardopt.plan(path, gpus=2, **QUICK)
    assert found.iteration_ms == pytest.approx(direct.iteration_ms)


def test_statistics_take_the_place_of_a_files_own(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    shardopt.to_yaml(Model(bag("a")), path, batch_size=512, default_pooling_factor=1.0)
    stats = write_window(tmp_path / "data.npz", 70.0, names=("a_f0",), rows=10_000)
    one, many = (
        shardopt.plan(path, gpus=2, stats=s, **QUICK | {"batch_size": 65_536}) for s in ((), stats)
    )
    assert many.setting.workload.tables[0].features[0].pooling_factor == 70.0
    assert many.iteration_ms > one.iteration_ms
    again = shardopt.predict(path, many, stats=stats, batch_size=65_536)
    assert again.iteration_ms == pytest.approx(many.iteration_ms)


def test_bad_input_is_told_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="gpus_per_node"):
        shardopt.plan("model.yaml", gpus=2, gpu_per_node=2)
    for wrong in ({"gpus": "many"}, {"gpus": 2.5}, {"effort": "high"}, {"objective": "best"}):
        with pytest.raises(InputError, match=f"{next(iter(wrong))} is"):
            shardopt.plan("model.yaml", **{"gpus": 2, **wrong})
    with pytest.raises(InputError, match="give batch_size"):
        shardopt.plan(Model(), gpus=2)
    with pytest.raises(InputError, match="capture is for a module"):
        shardopt.plan("model.yaml", gpus=2, capture={"dense_optimizer": "adam"})


def test_an_answer_and_a_plan_of_torchrec_can_be_printed_and_kept(tmp_path: Path) -> None:
    module, capture = Model(bag("a")), {"default_pooling_factor": 1.0}
    found = shardopt.plan(module, gpus=2, capture=capture, **QUICK)
    assert f"{found.iteration_ms:.3f} ms" in repr(found)
    assert found.rows[0]["found_by"] in str(found)
    assert len(str(found).splitlines()) == 1 + len(found.rows)
    theirs = found.plan.to_torchrec(module, device="cuda")
    with pytest.raises(InputError, match="from_torchrec"):
        shardopt.predict(module, theirs, batch_size=512, capture=capture)
    with pytest.raises(InputError, match="from_torchrec"):
        shardopt.predict(module, str(theirs), batch_size=512, capture=capture)
    ours = shardopt.from_torchrec(theirs, module, world_size=2)
    shardopt.save_plan(ours, tmp_path / "plan.json")
    again = shardopt.load_plan(tmp_path / "plan.json")
    assert again.tables == found.plan.tables


def test_an_explanation_has_the_advice_and_the_bound_of_the_plan(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(MODEL)
    options = {"effort": 0.005, "scenarios": "none", "cache": False}
    found = shardopt.plan(path, gpus=2, **options)
    told = shardopt.explain(path, found).to_dict()
    assert told["advice"]
    assert [one["name"] for one in told["advice"]] == [
        one["name"] for one in found.to_dict()["advice"]
    ]
    assert told["lower_bound_ms"] == found.to_dict()["lower_bound_ms"] > 0
