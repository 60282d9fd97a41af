"""Hash tables of dynamicemb in the hook, as TorchEasyRec and NVIDIA offer them; neither is here."""

from __future__ import annotations

import pytest

pytest.importorskip("torchrec")

import copy
import logging
from dataclasses import dataclass
from typing import Any

from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ParameterConstraints, Shard
from torchrec.distributed.types import CacheParams

from predictor.units import GIB
from shardopt.torchrec.options import CUSTOMIZED
from tests.shardopt.torchrec.hook_models import SHARDERS, Model, bag, factors, planner, topology

pytestmark = pytest.mark.usefixtures("kept_answers")


@dataclass
class TableOptions:
    """Of dynamicemb's, what its name has here."""

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
        made = copy.deepcopy(option)
        made.compute_kernel, made.cache_params = CUSTOMIZED, CacheParams(load_factor=factor)
        made.use_dynamicemb, made.dynamicemb_options = True, TableOptions(caching)
        return made

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
    told = factors(d=20.0, b=2.0)
    told["d"] = ParameterConstraints(
        pooling_factors=[20.0],
        sharding_types=["row_wise"],
        compute_kernels=[CUSTOMIZED],
        **more,
    )
    made = planner(topology=ranks, constraints=told, enumerator=Offering(ranks, 512))
    plan = made.plan(Model(bag("d", 20_000_000, 64), bag("b")), SHARDERS)
    return made, plan


@pytest.mark.parametrize(("gib", "fits"), [(16.0, True), (1.2, False)])
def test_one_of_the_offered_options_is_returned(gib: float, fits: bool) -> None:
    made, plan = planned(gib)
    assert plan.plan["ebc"]["d"].compute_kernel == CUSTOMIZED
    chosen = next(option for option in made._best_plan if option.name == "d")
    assert isinstance(chosen.dynamicemb_options, TableOptions), "its own plan is made of this"
    kernel = made.found.plan.tables["d"].compute_kernel
    assert (kernel == "dynamicemb") == (chosen.cache_load_factor == 1.0) == fits
    if not fits:
        assert (kernel == "dynamicemb_caching") == chosen.dynamicemb_options.caching
        assert chosen.cache_load_factor == made.found.plan.tables["d"].cache_load_factor < 1.0
    assert [shard.rank for shard in chosen.shards] == [0, 1, 2, 3]
    assert made.found.problem.workload.tables[0].storage == "dynamicemb"


def test_its_prices_are_said_to_be_rough(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shardopt"):
        planned(16.0)
    assert any("dynamicemb ('d')" in record.getMessage() for record in caplog.records)


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
    made = planner(
        topology=ranks, constraints=factors(d=20.0, b=2.0), enumerator=Placeholders(ranks, 512)
    )
    with caplog.at_level(logging.WARNING, "shardopt"):
        plan = made.plan(Model(bag("d", 200_000_000, 64), bag("b")), SHARDERS)
    assert set(plan.plan["ebc"]) == {"d", "b"}
    assert set(made.found.left) == {("ebc", "d")}
    assert "dynamicemb's own planner" in caplog.text
