"""Hash tables of dynamicemb in the hook, as others offer them, and TorchRec's key-value tables."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torchrec import EmbeddingCollection
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ParameterConstraints, Shard
from torchrec.distributed.types import CacheParams, KeyValueParams
from torchrec.modules.embedding_configs import EmbeddingConfig

from predictor.units import GIB
from shardopt import from_torchrec, to_torchrec
from shardopt.torchrec.options import CUSTOMIZED
from tests.shardopt.torchrec.hook_models import (
    SHARDERS,
    Model,
    bag,
    factors,
    holding,
    planner,
    topology,
)


@dataclass
class TableOptions:
    """Stand-in for dynamicemb's options of the same name."""

    caching: bool = False


class Offering(EmbeddingEnumerator):
    """Gives the table "d" options as TorchEasyRec's does: two modes at ten load factors."""

    def enumerate(self, module: Any, sharders: Any) -> list[Any]:
        offered = []
        for option in super().enumerate(module, sharders):
            if option.name != "d":
                offered.append(option)
            elif (option.sharding_type, option.compute_kernel) == ("row_wise", "fused"):
                offered += [
                    self._of(option, c, i / 10) for c in (False, True) for i in range(1, 11)
                ]
        return offered

    def _of(self, option: Any, caching: bool, factor: float) -> Any:
        offered = copy.deepcopy(option)
        offered.compute_kernel, offered.cache_params = CUSTOMIZED, CacheParams(load_factor=factor)
        offered.use_dynamicemb, offered.dynamicemb_options = True, TableOptions(caching)
        return offered

    def populate_estimates(self, sharding_options: list[Any]) -> None:
        """TorchEasyRec's estimators know the kernel; TorchRec's take another for it."""
        own = [option for option in sharding_options if option.compute_kernel == CUSTOMIZED]
        for option in own:
            option.compute_kernel = "fused_uvm_caching"
        super().populate_estimates(sharding_options)
        for option in own:
            option.compute_kernel = CUSTOMIZED


def planned(gib: float, **more: Any) -> tuple[Any, Any]:
    ranks = topology(4, int(gib * GIB))
    constraints = factors(d=20.0, b=2.0)
    constraints["d"] = ParameterConstraints(
        pooling_factors=[20.0],
        sharding_types=["row_wise"],
        compute_kernels=[CUSTOMIZED],
        **more,
    )
    hook = planner(topology=ranks, constraints=constraints, enumerator=Offering(ranks, 512))
    plan = hook.plan(Model(bag("d", 20_000_000, 64), bag("b")), SHARDERS)
    return hook, plan


@pytest.mark.parametrize(("gib", "fits"), [(16.0, True), (1.2, False)])
def test_one_of_the_offered_options_is_returned(
    gib: float, fits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    hook, plan = planned(gib)
    assert "dynamicemb ('d')" in caplog.text, "its prices are said to be rough"
    assert plan.plan["ebc"]["d"].compute_kernel == CUSTOMIZED
    chosen = next(option for option in hook._best_plan if option.name == "d")
    assert isinstance(chosen.dynamicemb_options, TableOptions), "its own plan is made of this"
    kernel = hook.found.plan.tables["d"].compute_kernel
    assert (kernel == "dynamicemb") == (chosen.cache_load_factor == 1.0) == fits
    if not fits:
        assert (kernel == "dynamicemb_caching") == chosen.dynamicemb_options.caching
        assert chosen.cache_load_factor == hook.found.plan.tables["d"].cache_load_factor < 1.0
    assert [shard.rank for shard in chosen.shards] == [0, 1, 2, 3]
    assert hook.found.problem.workload.tables[0].storage == "dynamicemb"


class Placeholders(EmbeddingEnumerator):
    """Gives the table "d" shards of one element, as NVIDIA's does: its planner places it."""

    def enumerate(self, module: Any, sharders: Any) -> list[Any]:
        offered = []
        for option in super().enumerate(module, sharders):
            if option.name != "d":
                offered.append(option)
            elif (option.sharding_type, option.compute_kernel) == ("row_wise", "fused"):
                option.shards = [Shard(size=[1, 1], offset=[i, 0]) for i in range(4)]
                offered.append(option)
        self.populate_estimates(offered)
        return offered


def test_a_table_that_dynamicembs_planner_places_is_left_to_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = topology(4, 2 * GIB)
    hook = planner(
        topology=ranks, constraints=factors(d=20.0, b=2.0), enumerator=Placeholders(ranks, 512)
    )
    plan = hook.plan(Model(bag("d", 200_000_000, 64), bag("b")), SHARDERS)
    assert set(plan.plan["ebc"]) == {"d", "b"}
    assert set(hook.found.unpredicted) == {("ebc", "d")}
    assert "dynamicemb's own planner" in caplog.text


def key_value(kernel: str, **sizes: int) -> dict[str, ParameterConstraints]:
    constraints = factors(a=20.0, b=2.0)
    constraints["a"].compute_kernels = [kernel]
    constraints["a"].sharding_types = ["table_wise", "row_wise"]
    constraints["a"].key_value_params = KeyValueParams(**sizes)
    return constraints


@pytest.mark.parametrize("kernel", ["key_value", "dram_virtual_table"])
def test_a_key_value_table_is_planned_with_its_caches(
    kernel: str, caplog: pytest.LogCaptureFixture
) -> None:
    if kernel not in {k.value for k in EmbeddingComputeKernel}:
        pytest.skip("came with a later torchrec")
    constraints = key_value(kernel, l2_cache_size=2, max_l1_cache_size=8)
    hook, model = planner(constraints=constraints), Model(bag("a", 10_000_000), bag("b"))
    plan = hook.plan(model, SHARDERS)
    sharding = plan.plan["ebc"]["a"]
    assert (sharding.compute_kernel, sharding.key_value_params) == (
        kernel,
        constraints["a"].key_value_params,
    )
    assert not hook.found.unpredicted
    assert hook.found.plan.tables["a"].store_caches == (8.0, 2.0)
    assert "key-value tables ('a')" in caplog.text
    ours = from_torchrec(plan, model, world_size=4, local_world_size=4)
    assert to_torchrec(ours, model).plan == plan.plan
    fast = planner(constraints=factors(a=20.0, b=2.0))
    fast.plan(model, SHARDERS)
    assert hook.found.prediction.iteration_ms > fast.found.prediction.iteration_ms


def test_virtual_tables_keep_the_shards_of_their_buckets() -> None:
    config = EmbeddingConfig(
        name="a",
        num_embeddings=10**15 + 40,
        embedding_dim=64,
        feature_names=["a_f0"],
        use_virtual_table=True,
        total_num_buckets=40,
    )
    model = holding(EmbeddingCollection(tables=[config], device=torch.device("meta")))
    constraints = key_value("dram_virtual_table", max_l1_cache_size=128)
    constraints = {"a": constraints["a"]}
    constraints["a"].sharding_types = ["row_wise"]
    plans = [
        make(topology=topology(4), batch_size=512, constraints=constraints, debug=False).plan(
            model, SHARDERS
        )
        for make in (EmbeddingShardingPlanner, planner)
    ]
    assert plans[0].plan["x"]["a"] == plans[1].plan["x"]["a"]
