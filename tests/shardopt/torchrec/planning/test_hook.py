"""The planner hook: what TorchRec's own planner does, with our choice of plan."""

from __future__ import annotations

import inspect
import logging
import os
import pickle
import subprocess
import sys
import time
from typing import Any

import pytest

pytest.importorskip("torchrec")

import torch
import torchrec
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.proposers import GreedyProposer
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType
from torchrec.distributed.types import CacheParams
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from predictor.errors import InputError
from predictor.model.op_calls import OpCall
from predictor.units import GIB
from search.space.build import whole_space
from shardopt import from_torchrec, predict
from shardopt.config import load_model
from shardopt.torchrec import ShardoptPerfModel, ShardoptPlanner, to_yaml
from tests.shardopt.torchrec.hook_models import (
    EFFORT,
    SHARDERS,
    Model,
    bag,
    factors,
    planner,
    problem_of,
    topology,
    workload_of,
)

pytestmark = pytest.mark.usefixtures("kept_answers")


def test_it_is_a_torchrec_planner_and_plans_every_table() -> None:
    made = planner()
    assert isinstance(made, EmbeddingShardingPlanner)
    plan = made.plan(Model(), SHARDERS)
    assert set(plan.plan["ebc"]) == {"a", "b"}


def test_the_plan_is_the_one_that_the_search_ranked_first() -> None:
    made, model = planner(), Model()
    plan = made.plan(model, SHARDERS)
    assert made.found is not None
    problem, best = made.found.problem, made.found.result.best
    ours = from_torchrec(plan, model, world_size=4, local_world_size=4)
    again = predict(problem.workload, problem.topology, problem.hardware, ours)
    assert again.iteration_ms == pytest.approx(best.iteration_ms)
    assert best.iteration_ms <= min(made.found.result.baselines.values()) * (1 + 1e-9)


def test_a_planner_may_be_asked_twice_and_answers_alike() -> None:
    made = planner()
    first, second = (str(made.plan(Model(), SHARDERS)) for _ in range(2))
    assert first == second == str(planner(cache=False).plan(Model(), SHARDERS))


@pytest.mark.slow
def test_the_plan_does_not_hang_on_the_hash_seed() -> None:
    """TorchRec's enumerator goes through sets, so the order of a table's options does."""
    script = (
        "from tests.shardopt.torchrec.planning.test_hook import *\n"
        "told = factors(a=20.0, b=2.0)\n"
        "for constraint in told.values():\n"
        "    constraint.sharding_types = ['row_wise', 'table_wise', 'column_wise']\n"
        "kernels = ['fused', 'quant', 'fused_uvm', 'quant_uvm', 'fused_uvm_caching']\n"
        "sharder = Offering(**dict.fromkeys(told['a'].sharding_types, kernels))\n"
        "made = planner(constraints=told, cache=False)\n"
        "print(made.plan(Model(bag('a', 10**5, 128), bag('b')), [sharder]))\n"
    )
    plans = {
        subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in (0, 1)
    }
    assert len(plans) == 1


def test_a_module_without_tables_has_an_empty_plan() -> None:
    assert planner().plan(nn.Linear(2, 2), SHARDERS).plan == {}


def test_the_options_are_enumerated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = planner(), []
    enumerate_ = made._enumerator.enumerate
    monkeypatch.setattr(
        made._enumerator, "enumerate", lambda **given: asked.append(given) or enumerate_(**given)
    )
    made.plan(Model(), SHARDERS)
    assert len(asked) == 1


# --- constraints and memory ---------------------------------------------------------------------


def test_constraints_are_kept() -> None:
    told = factors(a=20.0, b=2.0)
    told["a"].sharding_types = ["row_wise"]
    told["b"].sharding_types = ["table_wise"]
    told["b"].compute_kernels = ["fused_uvm_caching"]
    told["b"].cache_params = CacheParams(load_factor=0.3)
    plan = planner(constraints=told).plan(Model(), SHARDERS).plan["ebc"]
    assert plan["a"].sharding_type == "row_wise"
    assert plan["a"].ranks == [0, 1, 2, 3]
    assert (plan["b"].sharding_type, plan["b"].compute_kernel) == (
        "table_wise",
        "fused_uvm_caching",
    )
    assert plan["b"].cache_params.load_factor == 0.3


def test_the_reservation_is_kept_free() -> None:
    """Two tables of 5.1 GB: on ranks of 8 GiB there is room for one each, with a reserve."""
    model = Model(bag("a", 20_000_000), bag("b", 20_000_000))
    told = factors(a=1.0, b=1.0)
    for constraint in told.values():
        constraint.sharding_types = ["table_wise"]
        constraint.compute_kernels = ["fused"]
    made = planner(
        topology=topology(2, 8 * GIB),
        constraints=told,
        storage_reservation=FixedPercentageStorageReservation(0.1),
    )
    plan = made.plan(model, SHARDERS).plan["ebc"]
    assert {*plan["a"].ranks, *plan["b"].ranks} == {0, 1}
    tight = planner(
        topology=topology(2, 8 * GIB),
        constraints=told,
        storage_reservation=FixedPercentageStorageReservation(0.5),
    )
    with pytest.raises(PlannerError, match=r"Possible solutions") as caught:
        tight.plan(model, SHARDERS)
    assert caught.value.error_type is PlannerErrorType.INSUFFICIENT_STORAGE


def test_a_table_beyond_all_memory_is_refused_before_its_shards_are_counted() -> None:
    model = Model(bag("huge", 1_000_000, 10_000_000))
    began = time.monotonic()
    with pytest.raises(PlannerError, match=r"table 'huge' .* 36\.4 TiB") as caught:
        planner(topology=topology(8, 80 * GIB)).plan(model, SHARDERS)
    assert caught.value.error_type is PlannerErrorType.INSUFFICIENT_STORAGE
    assert time.monotonic() - began < 5.0


def test_what_fits_nowhere_as_a_whole_is_a_strict_constraint() -> None:
    model = Model(bag("a", 20_000_000))
    told = factors(a=1.0)
    told["a"].sharding_types, told["a"].compute_kernels = ["table_wise"], ["fused"]
    made = planner(topology=topology(4, 4 * GIB), constraints=told)
    with pytest.raises(PlannerError) as caught:
        made.plan(model, SHARDERS)
    assert caught.value.error_type is PlannerErrorType.STRICT_CONSTRAINTS
    assert "rank" in str(caught.value)


class Offering(EmbeddingBagCollectionSharder):
    """Offers what it is told to, whatever the device."""

    def __init__(self, **kernels_of: list[str]) -> None:
        super().__init__()
        self.kernels_of = kernels_of

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(self.kernels_of)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return self.kernels_of[sharding_type]


def test_kernels_that_the_sharder_does_not_offer_are_never_chosen() -> None:
    """As in TorchRec's `test_fail_then_rerun`: nothing is moved to host memory unasked."""
    made = planner(topology=topology(2, 16 * 2**20), constraints=factors(a=1.0))
    model = Model(bag("a", 40960, 128))
    with pytest.raises(PlannerError) as caught:
        made.plan(model, [Offering(table_wise=["fused"])])
    assert caught.value.error_type is PlannerErrorType.STRICT_CONSTRAINTS
    both = Offering(table_wise=["fused"], row_wise=["fused"])
    assert made.plan(model, [both]).plan["ebc"]["a"].sharding_type == "row_wise"


def test_a_kernel_is_offered_for_its_sharding_type_alone() -> None:
    """Beside rows in host memory, whole tables on the device: rows on the device do not follow."""
    sharder = Offering(table_wise=["fused"], row_wise=["fused_uvm"])
    made = planner(constraints=factors(a=20.0, b=20.0))
    model = Model(bag("a", 100_000, 128), bag("b", 100_000, 128))
    for options in whole_space(problem_of(made, model, [sharder])).options:
        assert {(o.sharding_type, o.compute_kernel) for o in options} == {
            ("table_wise", "fused"),
            ("row_wise", "fused_uvm"),
        }


# --- modules --------------------------------------------------------------------------------


def test_an_embedding_collection_is_planned() -> None:
    config = EmbeddingConfig(name="a", num_embeddings=1000, embedding_dim=32, feature_names=["f"])
    ec = torchrec.EmbeddingCollection(tables=[config], device=torch.device("meta"))
    model = nn.Module()
    model.seq = ec
    made = planner(constraints=factors(a=20.0))
    assert set(made.plan(model, SHARDERS).plan["seq"]) == {"a"}
    assert made.found.problem.workload.tables[0].pooling == "none"


def test_weighted_modules_are_weighted() -> None:
    assert all(t.weighted for t in workload_of(Model(is_weighted=True)).tables)


def test_a_module_may_be_the_root() -> None:
    plan = planner().plan(Model().ebc, SHARDERS)
    assert set(plan.plan[""]) == {"a", "b"}


def test_tables_of_one_name_in_two_modules_are_both_planned() -> None:
    model = nn.Module()
    model.one, model.two = Model(bag("a")).ebc, Model(bag("a", 99)).ebc
    plan = planner(constraints=factors(a=2.0)).plan(model, SHARDERS)
    assert {path: set(tables) for path, tables in plan.plan.items()} == {"one": {"a"}, "two": {"a"}}
    assert plan.plan["two"]["a"].ranks is not None


def test_a_feature_processor_keeps_to_what_torchrec_allows() -> None:
    from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder

    ebc = Model(bag("a"), is_weighted=True).ebc
    processor = PositionWeightedModuleCollection({"a_f0": 10}, device=torch.device("meta"))
    model = nn.Module()
    model.fp = FeatureProcessedEmbeddingBagCollection(ebc, processor)
    made = planner(constraints=factors(a=2.0))
    plan = made.plan(model, [FeatureProcessedEmbeddingBagCollectionSharder()])
    assert set(plan.plan["fp"]) == {"a"}
    offered = made.found.problem.workload.tables[0].constraints.offered
    assert "row_wise" not in {kind for kind, _ in offered}


# --- what rides along --------------------------------------------------------------------------


def test_callbacks_and_statistics_see_placed_options_with_estimates() -> None:
    seen: list[Any] = []

    class Told(EmbeddingStats):
        def log(self, *args: Any, **kwargs: Any) -> None:
            super().log(*args, **kwargs)
            seen.append(kwargs["best_plan"])

    def callback(options: list[Any]) -> list[Any]:
        seen.append(options)
        return options

    planner(stats=Told(), callbacks=[callback]).plan(Model(), SHARDERS)
    assert len(seen) == 2
    for options in seen:
        for option in options:
            for shard in option.shards:
                assert shard.rank is not None
                assert shard.perf.total > 0
                assert shard.storage is not None


def test_a_baseline_that_finds_nothing_does_not_end_the_search() -> None:
    """A CPU sharder with row_wise alone: TorchRec's own lists it for GPUs only."""
    made = planner(topology=Topology(world_size=2, compute_device="cpu"), hardware="cpu-gloo")
    plan = made.plan(Model(), [Offering(row_wise=["fused"])]).plan["ebc"]
    assert {sharding.sharding_type for sharding in plan.values()} == {"row_wise"}


def test_a_model_file_of_a_module_gives_the_same_plan(tmp_path: Any) -> None:
    model, told = Model(), factors(a=20.0, b=2.0)
    workload = to_yaml(model, tmp_path / "m.yaml", batch_size=512, constraints=told)
    found = workload_of(model)
    assert [t.features for t in workload.tables] == [t.features for t in found.tables]
    ours, theirs = (w.dense.program(w) for w in (workload, found))
    assert (ours.forward, ours.backward) == (theirs.forward, theirs.backward)
    again = planner(model=tmp_path / "m.yaml", constraints=None).plan(model, SHARDERS)
    assert str(again) == str(planner().plan(model, SHARDERS))


def test_a_model_file_says_what_was_guessed(tmp_path: Any) -> None:
    given = {"batch_size": 512, "constraints": factors(a=20.0, b=2.0)}
    to_yaml(Model(), tmp_path / "m.yaml", **given)
    head = [x for x in (tmp_path / "m.yaml").read_text().splitlines() if x.startswith("#")]
    for what in ("train_pipeline is base", "dense.data_type", "dense.optimizer", "exact_sgd"):
        assert any(what in line for line in head)
    found = to_yaml(
        Model(),
        tmp_path / "m.yaml",
        **given,
        train_pipeline="sparse_dist",
        dense_data_type="bf16",
        dense_optimizer="adam",
    )
    assert load_model(tmp_path / "m.yaml") == found
    assert found.train_pipeline == "sparse_dist"
    assert (found.dense.data_type, found.dense.optimizer) == ("fp32", "adam")
    calls = found.dense.program(found).forward
    halves = [c.name for c in calls if isinstance(c, OpCall) and c.outputs[0].data_type == "bf16"]
    assert halves.count("addmm") == 2, "forward runs under autocast"
    assert "train_pipeline is" not in (tmp_path / "m.yaml").read_text()
    with pytest.raises(InputError, match="train_pipeline is 'fast'; allowed are base"):
        to_yaml(Model(), tmp_path / "m.yaml", **given, train_pipeline="fast")


def test_torchrecs_own_planner_can_rate_by_our_prediction() -> None:
    model, told = Model(), factors(a=20.0, b=2.0)
    for constraint in told.values():
        # replicated tables, which its proposers offer, train otherwise: our planner has none
        constraint.sharding_types = ["table_wise", "column_wise", "row_wise"]
    model_of_time = ShardoptPerfModel(
        topology(), model, SHARDERS, 512, hardware="a100-80gb", constraints=told
    )
    rated: list[float] = []

    class Watched(ShardoptPerfModel):
        def rate(self, plan: list[Any]) -> float:
            rated.append(model_of_time.rate(plan))
            return rated[-1]

    theirs = EmbeddingShardingPlanner(
        topology=topology(),
        batch_size=512,
        constraints=told,
        performance_model=Watched(topology(), model, SHARDERS, 512, hardware="a100-80gb"),
        debug=False,
    )
    plan = from_torchrec(theirs.plan(model, SHARDERS), model, world_size=4, local_world_size=4)
    made = planner(constraints=told)
    made.plan(model, SHARDERS)
    problem = made.found.problem
    chosen = predict(problem.workload, problem.topology, problem.hardware, plan)
    assert chosen.iteration_ms == pytest.approx(min(rated))
    assert made.found.result.best.iteration_ms <= min(rated) * (1 + 1e-9)


# --- the whole signature ------------------------------------------------------------------------


def test_all_arguments_of_torchrec_are_taken_in_its_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    theirs = list(inspect.signature(EmbeddingShardingPlanner.__init__).parameters)
    ours = list(inspect.signature(ShardoptPlanner.__init__).parameters)
    assert ours[: len(theirs)] == theirs
    ranks = topology()
    with caplog.at_level(logging.WARNING, "shardopt"):
        made = ShardoptPlanner(
            ranks,
            512,
            None,
            None,
            GreedyProposer(),
            GreedyPerfPartitioner(),
            NoopPerfModel(ranks),
            None,
            factors(a=1.0, b=1.0),
            False,
            effort=EFFORT,
        )
    assert caplog.text.count("search takes the place") == 1
    assert "proposer, partitioner, performance_model" in caplog.text
    assert set(made.plan(Model(), SHARDERS).plan["ebc"]) == {"a", "b"}


def test_errors_are_torchrecs_too() -> None:
    with pytest.raises(PlannerError, match="no pooling factor") as caught:
        planner(constraints=factors(a=1.0), strict=True).plan(Model(), SHARDERS)
    assert isinstance(caught.value, InputError)
    assert caught.value.error_type is PlannerErrorType.INPUT_VALIDATION
    assert pickle.loads(pickle.dumps(caught.value)).error_type is caught.value.error_type
