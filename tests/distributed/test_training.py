"""TorchRec trains under our plans, over real processes, and learns what one process learns."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from predictor.model.plan import ShardingPlan, ShardingType
from predictor.model.plan_json import plan_to_dict
from shardopt.plan import load_plan
from tests.distributed import training_case as case
from tests.distributed.ranks import on_ranks
from tests.quick import quick_first

pytestmark = pytest.mark.distributed

QUICK = ("mixed",)
"""Tables sharded in all ways that one host has."""
SLOW = tuple(name for name in case.PLAN_NAMES if name not in QUICK)
KINDS_OVER_HOSTS = ("table_row_wise", "table_column_wise", "grid_shard", "row_wise")
TWO_HOSTS = {
    f"two hosts, {kind}": case.uniform_plan(ShardingType(kind), 4, 2) for kind in KINDS_OVER_HOSTS
}
Found = dict[str, list[dict[str, np.ndarray]]]
"""Name of a plan -> what each rank saved."""


def train(folder: Path) -> dict[str, dict[str, np.ndarray]]:
    """Train under every plan of a folder; return this rank's losses, shards and replicas."""
    results = {}
    for path in sorted(folder.glob("*.json")):
        load = case.workload()
        model = case.sharded_model(load, load_plan(path))
        load_weights(model, case.initial_weights())
        losses = case.train(model, load, case.own_batches(load, case.STEPS))
        results[path.stem] = {"losses": np.array(losses), **saved(model)}
    return results


@torch.no_grad()
def load_weights(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    """Give every parameter and shard its part of an unsharded model's weights."""
    for name, value in model.state_dict().items():
        for offset, part in parts(value):
            rows, columns = (*offset, 0)[:2] if offset else (0, 0)
            weight = weights[name]
            if part.dim() == 2:
                weight = weight[rows : rows + part.shape[0], columns : columns + part.shape[1]]
            part.copy_(weight)


def saved(model: nn.Module) -> dict[str, np.ndarray]:
    """`name|row|column` -> values, for this rank's shards; `name` alone where it has it whole."""
    return {
        "|".join([name, *map(str, offset)]): part.detach().numpy().copy()
        for name, value in model.state_dict().items()
        for offset, part in parts(value)
    }


def parts(value: Any) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Offset and tensor of every local shard of a ShardedTensor; a plain tensor has no offset."""
    if not hasattr(value, "local_shards"):  # a ShardedTensor calls itself a torch.Tensor
        return [((), value)]
    return [(tuple(s.metadata.shard_offsets), s.tensor) for s in value.local_shards()]


def trained(folder: Path, plans: dict[str, ShardingPlan]) -> Found:
    """Train under all plans with one process per rank: starting them takes longest."""
    for name, plan in plans.items():
        (folder / f"{name}.json").write_text(json.dumps(plan_to_dict(plan)))
    plan = next(iter(plans.values()))
    results = on_ranks(train, folder, ranks=plan.world_size, on_host=plan.local_world_size)
    return {name: [rank[name] for rank in results] for name in plans}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...]], Found]:
    """Return a function that trains under several plans, once for each set of names."""

    @cache
    def of(names: tuple[str, ...]) -> Found:
        plans = {name: plan_under_test(name) for name in names}
        return trained(tmp_path_factory.mktemp("job"), plans)

    return of


def plan_under_test(name: str) -> ShardingPlan:
    return TWO_HOSTS.get(name) or case.plan_under_test(name)


CASES = [(job, name) for job in (QUICK, tuple(TWO_HOSTS), SLOW) for name in job]
CASES = quick_first(len(QUICK) + len(TWO_HOSTS), CASES)


@pytest.mark.parametrize(("job", "name"), CASES)
def test_ranks_learn_what_one_process_learns(
    results: Callable[[tuple[str, ...]], Found], job: tuple[str, ...], name: str
) -> None:
    check(results(job)[name], plan_under_test(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", case.SEARCHED)
def test_the_search_obeys_and_splits(name: str) -> None:
    """Otherwise the plans above would not be of the types that their names promise."""
    plan = case.plan_under_test(f"searched {name}")
    for table, allowed in zip(plan.tables.values(), case.SEARCHED[name], strict=True):
        assert table.sharding_type in allowed
    assert {shard.rank for table in plan.tables.values() for shard in table.shards} == {0, 1}


def check(results: list[dict[str, np.ndarray]], plan: ShardingPlan) -> None:
    """Losses and every updated parameter against the unsharded model's."""
    results = [dict(result) for result in results]
    losses, weights = case.reference(plan)
    mean = np.mean([result.pop("losses") for result in results], axis=0)
    np.testing.assert_allclose(mean, losses, rtol=1e-5)
    start = case.initial_weights()
    assert {key.split("|")[0] for result in results for key in result} == set(weights)
    for key, weight in weights.items():
        shards = assembled(results, key, tuple(weight.shape))
        np.testing.assert_allclose(shards, weight.numpy(), rtol=1e-4, atol=2e-6, err_msg=key)
        assert not np.array_equal(shards, start[key].numpy()), f"{key} was not trained"


def assembled(
    results: list[dict[str, np.ndarray]], name: str, shape: tuple[int, ...]
) -> np.ndarray:
    """A parameter put together from its shards; the copies of a whole one must agree."""
    array = np.full(shape, np.nan, dtype=np.float32)
    for result in results:
        for key, part in result.items():
            if key == name:
                np.testing.assert_allclose(part, results[0][name], rtol=1e-6, err_msg=name)
                array = part
            elif key.startswith(f"{name}|"):
                row, column = map(int, key.split("|")[1:])
                array[row : row + part.shape[0], column : column + part.shape[1]] = part
    return array
