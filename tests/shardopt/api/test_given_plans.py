"""Plans that are given: what TorchRec would refuse, and what a model's constraints forbid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from predictor.errors import InputError, PlanError
from shardopt.api.answer import plan
from shardopt.api.given_plans import predict_plans
from shardopt.api.request import Machine, PlanRequest
from tests.shardopt.conftest import table

ROWS = {"users": 200000, "items": 50000, "days": 7}


def written(folder: Path, **tables: dict[str, Any]) -> Path:
    """A plan of the model on two ranks; tables that are not given are table-wise on rank 0."""
    whole_shards = {
        name: table("table_wise", "fused", (0, [0, 0], [rows, 64])) for name, rows in ROWS.items()
    }
    path = folder / "plan.json"
    plan = {"schema": "shardopt.plan/1", "world_size": 2, "tables": {**whole_shards, **tables}}
    path.write_text(json.dumps(plan))
    return path


def halves(first: int, second: int, cut: int) -> dict[str, Any]:
    """The items row-wise on two ranks, cut after a row."""
    return table(
        "row_wise",
        "fused",
        (first, [0, 0], [cut, 64]),
        (second, [cut, 0], [50000 - cut, 64]),
    )


REPLICAS = tuple((rank, [0, 0], [7, 64]) for rank in (0, 1))


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"items": halves(1, 1, 25000)}, ["'items'", "row_wise", "ranks [1, 1]", "[0, 1]"]),
        ({"items": halves(0, 1, 30000)}, ["'items'", "30000 rows", "blocks of 25000"]),
        ({"items": halves(1, 0, 25000)}, ["'items'", "ranks [1, 0]"]),
        ({"days": table("data_parallel", "fused", *REPLICAS)}, ["'days'", "dense only"]),
    ],
)
def test_what_torchrec_would_refuse(
    model: Path, tmp_path: Path, tables: dict[str, Any], words: list[str]
) -> None:
    path = written(tmp_path, **tables)
    with pytest.raises(PlanError) as caught:
        predict_plans(model, [path], Machine())
    for word in [str(path), *words]:
        assert word in str(caught.value)


def test_plans_for_other_ranks_are_not_compared(model: Path, tmp_path: Path) -> None:
    """However the machine is chosen: their times would say nothing of the plans."""
    two = written(tmp_path)
    four = tmp_path / "four.json"
    four.write_text(json.dumps({**json.loads(two.read_text()), "world_size": 4}))
    with pytest.raises(InputError, match=r"four\.json is for 4 ranks"):
        predict_plans(model, [two, four], Machine("h100-sxm"))


def test_what_torchrec_runs(model: Path, tmp_path: Path) -> None:
    days = table("data_parallel", "dense", *REPLICAS)
    path = written(tmp_path, items=halves(0, 1, 25000), days=days)
    (prediction,) = predict_plans(model, [path], Machine()).predictions
    assert len(prediction.doubts) == 1
    assert "does not say which model file" in prediction.doubts[0]


def test_broken_constraints_are_named(model: Path, tmp_path: Path) -> None:
    text = model.read_text()
    wants = {
        200000: "{sharding_types: [row_wise], co_locate: together}",
        50000: "{ranks: [1], co_locate: together}",
        7: "{compute_kernels: [dense], co_locate: together}",
    }
    for rows, constraint in wants.items():
        line = f"    num_embeddings: {rows}\n"
        text = text.replace(line, f"{line}    constraints: {constraint}\n")
    model.write_text(text)
    items = table("table_wise", "fused", (1, [0, 0], [50000, 64]))
    (prediction,) = predict_plans(model, [written(tmp_path, items=items)], Machine()).predictions
    doubts = "\n".join(prediction.doubts)
    assert "'users' breaks the model's constraints: constraints.sharding_types" in doubts
    assert "'days' breaks the model's constraints: constraints.compute_kernels" in doubts
    assert "constraints.co_locate 'together' lie on different ranks" in doubts
    assert "'items'" not in doubts


def test_means_that_torchrec_computes_wrong_are_a_doubt(model: Path, tmp_path: Path) -> None:
    line = "    num_embeddings: 50000\n"
    model.write_text(model.read_text().replace(line, f"{line}    pooling: mean\n"))
    path = written(tmp_path, items=halves(0, 1, 25000))
    (prediction,) = predict_plans(model, [path], Machine()).predictions
    assert any("divide the output" in doubt for doubt in prediction.doubts)


def test_a_bound_holds_for_the_model_and_the_machine_it_was_proved_for(
    model: Path, tmp_path: Path
) -> None:
    answer = plan(PlanRequest(model=model, gpus=2, effort=0.01, scenarios="none"))
    path = tmp_path / "searched.json"
    path.write_text(answer.plan_text())

    def bound(**machine: Any) -> float | None:
        return predict_plans(model, [path], Machine(**machine)).predictions[0].bound_ms

    assert bound() == answer.result.lower_bound_ms > 0
    assert bound(batch_size=1024) is None
    assert bound(hbm_gib=40) is None
    assert bound(hardware="a100-80gb") is None
    text = path.read_text()
    path.write_text(json.dumps({**json.loads(text), "iteration_ms": 1.0}))
    assert bound() is None
    path.write_text(text)
    assert bound() is not None
    model.write_text(model.read_text().replace("pooling_factor: 4", "pooling_factor: 5"))
    assert bound() is None


def test_a_plan_that_no_search_wrote_has_no_bound(model: Path, tmp_path: Path) -> None:
    assert predict_plans(model, [written(tmp_path)], Machine()).predictions[0].bound_ms is None
