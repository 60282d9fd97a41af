"""TorchRec trains under our plans, over real processes, and learns what one process learns."""

import json
from pathlib import Path

import numpy as np
import pytest

from predictor.model.plan import ShardingPlan, ShardingType
from predictor.model.plan_json import plan_to_dict

pytest.importorskip("torchrec")
from tests.distributed import training_case as case
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed

QUICK = ("mixed", "searched free")
"""Together they shard in all ways that one host has."""
SLOW = tuple(name for name in case.PLAN_NAMES if name not in QUICK)
TWO_HOSTS = {
    "table_row_wise": case.uniform_plan(ShardingType.TABLE_ROW_WISE, 4, 2),
    "table_column_wise": case.uniform_plan(ShardingType.TABLE_COLUMN_WISE, 4, 2),
    "grid_shard": case.uniform_plan(ShardingType.GRID_SHARD, 4, 2),
    "row_wise": case.uniform_plan(ShardingType.ROW_WISE, 4, 2),
}


def train(job: Path, plans: dict[str, ShardingPlan]) -> Path:
    """Train under all plans with one process per rank: starting them takes longest."""
    (job / "plans").mkdir(parents=True)
    for name, plan in plans.items():
        (job / "plans" / f"{name}.json").write_text(json.dumps(plan_to_dict(plan)))
    plan = next(iter(plans.values()))
    run_ranks(
        "training_worker",
        job,
        world_size=plan.world_size,
        local_world_size=plan.local_world_size,
    )
    return job


def plans_of(names: tuple[str, ...]) -> dict[str, ShardingPlan]:
    return {name: case.plan_under_test(name, 2, 2) for name in names}


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of a few plans for one host of two ranks."""
    return train(tmp_path_factory.mktemp("quick") / "job", plans_of(QUICK))


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of the other plans for one host of two ranks."""
    return train(tmp_path_factory.mktemp("rest") / "job", plans_of(SLOW))


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of all plans for two hosts of two ranks."""
    return train(tmp_path_factory.mktemp("four") / "job", TWO_HOSTS)


@pytest.mark.parametrize("name", QUICK)
def test_two_ranks_learn_what_one_process_learns(quick: Path, name: str) -> None:
    check(quick, name, case.plan_under_test(name, 2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_two_ranks_learn_under_every_plan(rest: Path, name: str) -> None:
    check(rest, name, case.plan_under_test(name, 2, 2))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if f"searched {name}" in QUICK else pytest.mark.slow)
        for name in case.SEARCHED
    ],
)
def test_the_search_obeys_and_splits(name: str) -> None:
    """Otherwise the plans above would not be of the types that their names promise."""
    plan = case.plan_under_test(f"searched {name}", 2, 2)
    for table, allowed in zip(plan.tables.values(), case.SEARCHED[name], strict=True):
        assert table.sharding_type in allowed
    assert {shard.rank for table in plan.tables.values() for shard in table.shards} == {0, 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_HOSTS)
def test_two_hosts_learn_what_one_process_learns(two_hosts: Path, name: str) -> None:
    check(two_hosts, name, TWO_HOSTS[name])


@pytest.mark.slow
def test_ranks_plan_together_and_train_under_the_plan(tmp_path: Path) -> None:
    run_ranks("hook_worker", tmp_path)
    found = [json.loads((tmp_path / f"found.{rank}.json").read_text()) for rank in range(2)]
    assert found[0]["plan"] == found[1]["plan"]
    assert [rank["searched"] for rank in found] == [True, False]
    assert all(0.1 < loss < 10 for rank in found for loss in rank["losses"])


def check(job: Path, name: str, plan: ShardingPlan) -> None:
    """Losses and every updated parameter against the unsharded model's."""
    results = [dict(np.load(job / f"{name}.{r}.npz")) for r in range(plan.world_size)]
    losses, weights = case.reference(plan)
    mean = np.mean([result.pop("losses") for result in results], axis=0)
    np.testing.assert_allclose(mean, losses, rtol=1e-5)
    start = case.initial_weights()
    assert covered(results) == set(weights)
    for key, whole in weights.items():
        trained = assembled(results, key, tuple(whole.shape))
        np.testing.assert_allclose(trained, whole.numpy(), rtol=1e-4, atol=2e-6, err_msg=key)
        assert not np.array_equal(trained, start[key].numpy()), f"{key} was not trained"


def covered(results: list[dict[str, np.ndarray]]) -> set[str]:
    """Names of all parameters that some rank saved."""
    return {key.split("|")[0] for result in results for key in result}


def assembled(
    results: list[dict[str, np.ndarray]], name: str, shape: tuple[int, ...]
) -> np.ndarray:
    """A parameter put together from its shards; the copies of a whole one must agree."""
    whole = np.full(shape, np.nan, dtype=np.float32)
    for result in results:
        for key, part in result.items():
            if key == name:
                np.testing.assert_allclose(part, results[0][name], rtol=1e-6, err_msg=name)
                whole = part
            elif key.startswith(f"{name}|"):
                row, column = map(int, key.split("|")[1:])
                whole[row : row + part.shape[0], column : column + part.shape[1]] = part
    return whole
