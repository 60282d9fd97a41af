"""The planner hook: what TorchRec's own planner does, with our choice of plan."""

from __future__ import annotations

import inspect
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torchrec.distributed.planner import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    Topology,
)
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.proposers import GreedyProposer
from torchrec.distributed.planner.storage_reservations import (
    FixedAbsoluteStorageReservation,
    FixedPercentageStorageReservation,
)
from torchrec.distributed.planner.types import PlannerError, PlannerErrorType
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from predictor.errors import InputError
from predictor.model.op_calls import OpCall
from predictor.model.plan import ShardingPlan
from predictor.predict import predict
from predictor.units import GIB
from search.space.enumerate import whole_space
from search.space.option import place
from shardopt import from_torchrec
from shardopt.config import load_model
from shardopt.torchrec import ShardoptPerfModel, ShardoptPlanner, to_yaml
from shardopt.torchrec.collective import check_ranks
from shardopt.torchrec.confirming import Confirm
from shardopt.torchrec.options import to_options
from tests.shardopt.api.windows import write_window
from tests.shardopt.torchrec.hook_models import (
    EFFORT,
    SHARDERS,
    Kept,
    Model,
    Offering,
    bag,
    factors,
    holding,
    planner,
    problem_of,
    topology,
    workload_of,
)


def test_the_plan_is_the_one_that_the_search_ranked_first() -> None:
    hook, model = planner(), Model()
    plan = hook.plan(model, SHARDERS)
    assert hook.found is not None
    problem, best = hook.found.problem, hook.found.result.best
    ours = from_torchrec(plan, model, world_size=4, local_world_size=4)
    again = predict(problem.workload, problem.topology, problem.hardware, ours)
    assert again.iteration_ms == pytest.approx(best.iteration_ms)
    assert best.iteration_ms <= min(hook.found.result.baselines.values()) * (1 + 1e-9)


def test_a_planner_may_be_asked_twice_and_answers_alike() -> None:
    hook = planner()
    with patch.object(
        hook._enumerator, "enumerate", wraps=hook._enumerator.enumerate
    ) as enumerated:
        first, second = (str(hook.plan(Model(), SHARDERS)) for _ in range(2))
    assert first == second == str(planner(cache=False).plan(Model(), SHARDERS))
    assert enumerated.call_count == 2, "once a plan: it takes seconds"


# --- constraints and memory ---------------------------------------------------------------------


def test_the_reservation_is_kept_free() -> None:
    """Two tables of 5.1 GB: on ranks of 8 GiB there is room for one each, with a reserve."""
    model = Model(bag("a", 20_000_000), bag("b", 20_000_000))
    constraints = factors(a=1.0, b=1.0)
    for constraint in constraints.values():
        constraint.sharding_types = ["table_wise"]
        constraint.compute_kernels = ["fused"]
    hook = planner(
        topology=topology(2, 8 * GIB),
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(0.1),
    )
    plan = hook.plan(model, SHARDERS).plan["ebc"]
    assert {*plan["a"].ranks, *plan["b"].ranks} == {0, 1}
    tight = planner(
        topology=topology(2, 8 * GIB),
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(0.5),
    )
    with pytest.raises(PlannerError, match=r"Possible solutions") as caught:
        tight.plan(model, SHARDERS)
    assert caught.value.error_type is PlannerErrorType.INSUFFICIENT_STORAGE


def test_a_table_beyond_all_memory_is_refused_before_its_shards_are_counted() -> None:
    """To count them takes far longer."""
    model, reservation = Model(bag("huge", 1_000_000, 10_000_000)), FixedAbsoluteStorageReservation
    hook = planner(topology=topology(8, 80 * GIB), storage_reservation=reservation.from_gb(0.5))
    with pytest.raises(PlannerError, match=r"table 'huge' .* 36\.4 TiB.*0\.5 GB") as caught:
        hook.plan(model, SHARDERS)
    assert caught.value.error_type is PlannerErrorType.INSUFFICIENT_STORAGE


def test_a_kernel_is_offered_for_its_sharding_type_alone() -> None:
    """Beside rows in host memory, whole tables on the device: rows on the device do not follow."""
    sharder = Offering(table_wise=["fused"], row_wise=["fused_uvm"])
    hook = planner(constraints=factors(a=20.0, b=20.0))
    model = Model(bag("a", 100_000, 128), bag("b", 100_000, 128))
    for options in whole_space(problem_of(hook, model, [sharder])).options:
        assert {(o.sharding_type, o.compute_kernel) for o in options} == {
            ("table_wise", "fused"),
            ("row_wise", "fused_uvm"),
        }


# --- modules --------------------------------------------------------------------------------


def test_tables_of_one_name_in_two_modules_are_both_planned() -> None:
    model = nn.ModuleDict({"one": Model(bag("a")).ebc, "two": Model(bag("a", 99)).ebc})
    plan = planner(constraints=factors(a=2.0)).plan(model, SHARDERS)
    assert {path: set(tables) for path, tables in plan.plan.items()} == {"one": {"a"}, "two": {"a"}}
    assert plan.plan["two"]["a"].ranks is not None


def test_a_feature_processor_keeps_to_what_torchrec_allows() -> None:
    from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder

    ebc = Model(bag("a"), is_weighted=True).ebc
    processor = PositionWeightedModuleCollection({"a_f0": 10}, device=torch.device("meta"))
    model = holding(FeatureProcessedEmbeddingBagCollection(ebc, processor))
    hook = planner(constraints=factors(a=2.0))
    plan = hook.plan(model, [FeatureProcessedEmbeddingBagCollectionSharder()])
    assert set(plan.plan["x"]) == {"a"}
    offered = hook.found.problem.workload.tables[0].constraints.offered
    assert "row_wise" not in {kind for kind, _ in offered}


# --- what rides along --------------------------------------------------------------------------


def test_a_baseline_that_finds_nothing_does_not_end_the_search() -> None:
    """A CPU sharder with row_wise alone: TorchRec's own lists it for GPUs only."""
    hook = planner(topology=Topology(world_size=2, compute_device="cpu"), hardware="cpu-gloo")
    plan = hook.plan(Model(), [Offering(row_wise=["fused"])]).plan["ebc"]
    assert {sharding.sharding_type for sharding in plan.values()} == {"row_wise"}


def test_a_model_file_of_a_module_gives_the_same_plan(tmp_path: Any) -> None:
    model, constraints = Model(), factors(a=20.0, b=2.0)
    workload = to_yaml(model, tmp_path / "m.yaml", batch_size=512, constraints=constraints)
    from_module = workload_of(model)
    assert [t.features for t in workload.tables] == [t.features for t in from_module.tables]
    file_ops, module_ops = (w.dense.program(w) for w in (workload, from_module))
    assert (file_ops.forward, file_ops.backward) == (module_ops.forward, module_ops.backward)
    again = planner(model=tmp_path / "m.yaml", constraints=None).plan(model, SHARDERS)
    assert str(again) == str(planner().plan(model, SHARDERS))


def test_a_model_file_says_what_was_guessed(tmp_path: Any) -> None:
    arguments = {"batch_size": 512, "constraints": factors(a=20.0, b=2.0)}
    to_yaml(Model(), tmp_path / "m.yaml", **arguments)
    head = [x for x in (tmp_path / "m.yaml").read_text().splitlines() if x.startswith("#")]
    for guess in ("train_pipeline is base", "dense.data_type", "dense.optimizer", "exact_sgd"):
        assert any(guess in line for line in head)
    workload = to_yaml(
        Model(),
        tmp_path / "m.yaml",
        **arguments,
        train_pipeline="sparse_dist",
        dense_data_type="bf16",
        dense_optimizer="adam",
    )
    assert load_model(tmp_path / "m.yaml") == workload
    assert workload.train_pipeline == "sparse_dist"
    assert (workload.dense.data_type, workload.dense.optimizer) == ("bf16", "adam")
    calls = workload.dense.program(workload).forward
    halves = [c.name for c in calls if isinstance(c, OpCall) and c.outputs[0].data_type == "bf16"]
    assert halves.count("addmm") == 2, "forward runs under autocast"
    assert "train_pipeline is" not in (tmp_path / "m.yaml").read_text()
    with pytest.raises(InputError, match=r"train_pipeline is 'fast'.*allowed are base"):
        to_yaml(Model(), tmp_path / "m.yaml", **arguments, train_pipeline="fast")


def test_torchrecs_own_planner_can_rate_by_our_prediction() -> None:
    model, constraints = Model(), factors(a=20.0, b=2.0)
    for constraint in constraints.values():
        # replicated tables, which its proposers offer, train otherwise: our planner has none
        constraint.sharding_types = ["table_wise", "column_wise", "row_wise"]
    model_of_time = ShardoptPerfModel(
        topology(), model, SHARDERS, 512, hardware="a100-80gb", constraints=constraints
    )
    rated: list[float] = []

    class Watched(ShardoptPerfModel):
        def rate(self, plan: list[Any]) -> float:
            rated.append(model_of_time.rate(plan))
            return rated[-1]

    torchrec_planner = EmbeddingShardingPlanner(
        topology=topology(),
        batch_size=512,
        constraints=constraints,
        performance_model=Watched(topology(), model, SHARDERS, 512, hardware="a100-80gb"),
        debug=False,
    )
    plan = from_torchrec(
        torchrec_planner.plan(model, SHARDERS), model, world_size=4, local_world_size=4
    )
    hook = planner(constraints=constraints)
    hook.plan(model, SHARDERS)
    problem = hook.found.problem
    chosen = predict(problem.workload, problem.topology, problem.hardware, plan)
    assert chosen.iteration_ms == pytest.approx(min(rated))
    assert hook.found.result.best.iteration_ms <= min(rated) * (1 + 1e-9)


# --- the whole signature ------------------------------------------------------------------------


def test_all_arguments_of_torchrec_are_taken_in_its_order(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torchrec_arguments = list(inspect.signature(EmbeddingShardingPlanner.__init__).parameters)
    ours = list(inspect.signature(ShardoptPlanner.__init__).parameters)
    assert ours[: len(torchrec_arguments)] == torchrec_arguments
    ranks = topology()
    hook = ShardoptPlanner(
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
    assert caplog.text.count("search is used instead") == 1
    assert "proposer, partitioner, performance_model" in caplog.text
    assert set(hook.plan(Model(), SHARDERS).plan["ebc"]) == {"a", "b"}


def test_errors_are_torchrecs_too() -> None:
    with pytest.raises(PlannerError, match="no pooling factor") as caught:
        planner(constraints=factors(a=1.0), strict=True).plan(Model(), SHARDERS)
    assert isinstance(caught.value, InputError)
    assert caught.value.error_type is PlannerErrorType.INPUT_VALIDATION
    assert pickle.loads(pickle.dumps(caught.value)).error_type is caught.value.error_type


def test_what_callbacks_change_is_in_what_was_found() -> None:
    def to_rank_0(options: list[Any]) -> list[Any]:
        for option in options:
            if option.name == "a":
                option.sharding_type, option.partition_by = "table_wise", "device"
                option.shards = option.shards[:1]
                option.shards[0].size, option.shards[0].offset = [100_000, 64], [0, 0]
                option.shards[0].rank = 0
        return options

    constraints = factors(a=20.0, b=2.0)
    constraints["a"].sharding_types = ["row_wise"]
    hook = planner(constraints=constraints, callbacks=[to_rank_0])
    hook.plan(Model(), SHARDERS)
    outcome = hook.found
    assert outcome.changed == ("a",)
    assert outcome.plan.tables["a"].sharding_type == "table_wise"
    assert outcome.prediction.iteration_ms != outcome.result.best.iteration_ms


def test_the_second_planner_takes_the_answer_from_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, hook = planner(), planner()
    plan = str(first.plan(Model(), SHARDERS))
    monkeypatch.setattr("search.solve.solve", None)
    assert str(hook.plan(Model(), SHARDERS)) == plan
    assert hook.found is not None
    assert first.found is not None
    assert hook.found.result == first.found.result


def test_a_plan_with_what_no_enumerator_lists_loads_again() -> None:
    """Cuts of columns and load factors that the search adds."""
    model = Model(bag("a", 4_000_000, 256), bag("b", 4_000_000, 256))
    constraints = factors(a=40.0, b=40.0)
    for constraint in constraints.values():
        constraint.sharding_types = ["column_wise"]
        constraint.compute_kernels = ["fused_uvm_caching"]
        constraint.min_partition = 64
    arguments = {"constraints": constraints, "topology": topology(4, 4 * GIB), "effort": 0.05}
    first = planner(**arguments)

    def cut(options: list[Any]) -> list[Any]:
        """A plan that the search may find."""
        problem = first._planning.searched.problem
        space = whole_space(problem)
        shards_and_factors = ((2, 0.2), (4, 0.05))
        tables = {
            key: place(
                next(o for o in options if (o.num_shards, o.cache_load_factor) == want),
                range(want[0]),
            )
            for key, options, want in zip(
                space.keys, space.options, shards_and_factors, strict=True
            )
        }
        plan = ShardingPlan(tables, 4, 4)
        options_of_plan = to_options(plan, problem.workload, first._planning.space)
        first._enumerator.populate_estimates(options_of_plan)
        return options_of_plan

    first._callbacks.insert(0, cut)
    plan = first.plan(model, SHARDERS)
    assert {len(t.ranks) for t in plan.plan["ebc"].values()} == {2, 4}
    assert first.found.changed
    options = {option.storage_hash(): option for option in first._best_plan}
    loader = Kept(options, first.hash_planner_context_inputs_str())
    second = planner(**arguments, plan_loader=loader)
    again = second.plan(model, SHARDERS)
    assert str(again) == str(plan)
    assert second.found.result is None, "nothing is searched"
    assert second.found.plan == first.found.plan
    assert second.found.prediction.iteration_ms == first.found.prediction.iteration_ms
    assert [t.cache_params.load_factor for t in again.plan["ebc"].values()] == [0.2, 0.05]


def test_the_usual_load_factor_is_not_written_into_a_plan() -> None:
    constraints = factors(a=20.0, b=2.0)
    for constraint in constraints.values():
        constraint.compute_kernels = ["fused_uvm_caching"]
    hook = planner(constraints=constraints)
    problem = problem_of(hook, Model())
    workload, space = problem.workload, hook._planning.space
    tables = {
        key: place(next(o for o in options if o.cache_load_factor == 0.2), (0,))
        for key, options in zip(workload.keys, whole_space(problem).options, strict=True)
    }
    usual = to_options(ShardingPlan(tables, 4, 4), workload, space)
    assert {option.cache_load_factor for option in usual} == {None}
    key = workload.keys[0]
    tables[key] = replace(tables[key], parameters={"cache_params": {"load_factor": 0.5}})
    mixed = to_options(ShardingPlan(tables, 4, 4), workload, space)
    assert [option.cache_load_factor for option in mixed] == [0.5, 0.2]


MODEL = """
schema: 1
batch_size: 512
tables:
  - name: a
    num_embeddings: 100000
    embedding_dim: 64
    features: [{name: a_f0, pooling_factor: 2, index_distribution: {files: [mon.npz, tue.npz]}}]
  - name: b
    num_embeddings: 10000
    embedding_dim: 64
    features: [{name: b_f0, pooling_factor: 2, index_distribution: {files: [mon.npz, tue.npz]}}]
dense: {bottom_mlp: [64], top_mlp: [4, 1], interaction: concat, in_features: 4}
"""


def test_windows_of_a_model_file_are_scenarios(tmp_path: Path) -> None:
    for name, pooling in (("mon", 2.0), ("tue", 1e5)):
        write_window(tmp_path / f"{name}.npz", pooling, ("a_f0", "b_f0"), 10_000)
    model = tmp_path / "m.yaml"
    model.write_text(MODEL)
    hook = planner(model=model, constraints=None, objective="regret", scenarios="none")
    hook.plan(Model(), SHARDERS)
    assert hook.found is not None
    assert hook.found.result is not None
    mon, tue = hook.found.result.scenarios
    assert (mon.name, tue.name) == ("mon", "tue")
    assert mon.ours_ms < tue.ours_ms
    assert hook.found.result.aim == "regret"
    worst = hook.found.result.worst_regret
    assert worst is not None
    assert 0 <= worst < 1


MIB = 2**20


NAMES = [f"t{i}" for i in range(4)]


def of_tiny_devices(mib: int, **more: Any) -> ShardoptPlanner:
    """For four tables of 25.6 kB, which need more beside their weights; with one option each, no
    plan is sought among thousands that need more still."""
    constraints = factors(**dict.fromkeys(NAMES, 1.0))
    for constraint in constraints.values():
        constraint.sharding_types, constraint.compute_kernels = ["table_wise"], ["fused"]
    return planner(topology=topology(2, mib * MIB), constraints=constraints, **more)


def tiny() -> Model:
    return Model(*(bag(name, 100) for name in NAMES))


def test_a_plan_that_the_storage_estimator_accepts_is_returned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hook = of_tiny_devices(2)
    plan = hook.plan(tiny(), SHARDERS)
    assert set(plan.plan["ebc"]) == set(NAMES)
    assert "strict=True" in caplog.text
    assert "finds no plan that fits" not in caplog.text, "TorchRec's is there"
    assert hook.found.result.best.iteration_ms == pytest.approx(hook.found.prediction.iteration_ms)
    assert hook.found.result.lower_bound_ms <= hook.found.prediction.iteration_ms
    assert not any(rank.fits for rank in hook.found.prediction.memory)


def test_strict_refuses_what_does_not_fit_by_our_count() -> None:
    with pytest.raises(PlannerError) as caught:
        of_tiny_devices(2, strict=True).plan(tiny(), SHARDERS)
    assert caught.value.error_type is PlannerErrorType.STRICT_CONSTRAINTS


@pytest.mark.parametrize(("mib", "warns"), [(3, True), (16, False)])
def test_a_peak_beyond_the_device_is_told(
    mib: int, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    hook = of_tiny_devices(mib)
    hook.plan(tiny(), SHARDERS)
    assert ("by shardopt's count" in caplog.text) == warns
    (memory, _) = hook.found.prediction.memory
    assert memory.peak.capacity_bytes == mib * MIB, "as installed, before the reservation"


@pytest.mark.parametrize(("ranks", "warns"), [(8, False), (4, False), (6, True), (2, True)])
def test_a_topology_of_other_ranks_than_the_group_is_told(
    ranks: int, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group=None: ranks)
    check_ranks(4)
    assert (f"topology has 4 ranks, but the process group has {ranks}" in caplog.text) == warns


def test_plans_of_a_sharding_group_are_not_confirmed_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hook = planner(confirm=Confirm([]))  # of 4 ranks
    planned = hook.plan(Model(), SHARDERS)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group=None: 8)
    answer = planned, {"torchrec": planned}
    monkeypatch.setattr("shardopt.torchrec.hook.on_first_rank", lambda plan, group: answer)
    assert hook.collective_plan(Model(), SHARDERS) is planned
    assert hook.confirmed is None


def test_what_constraints_cost_is_logged_with_the_constraints_that_allow_the_faster_plan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Model(*(bag(name, rows=1_000, dim=128) for name in "abcd"))
    constraints = {
        name: ParameterConstraints(sharding_types=["row_wise"], pooling_factors=[n])
        for name, n in zip("abcd", (1.0, 9.0, 3.0, 3.0), strict=True)
    }
    arguments = {"batch_size": 131_072, "constraints": constraints, "cache": False}
    forced = planner(**arguments)
    forced.plan(model, SHARDERS)
    assert forced.found is not None
    costs = forced.found.constraint_costs
    assert costs is not None
    assert costs.gain > 0.01
    kinds = {key: table.compute_kernel for key, table in forced.found.plan.tables.items()}
    assert {key: t.compute_kernel for key, t in costs.plan.tables.items()} == kinds, "no optimizer"
    (pasted,) = [r.getMessage() for r in caplog.records if "constraints={" in r.getMessage()]
    names = {"constraints": constraints, "ParameterConstraints": ParameterConstraints}
    allowed = eval(pasted[pasted.index("constraints={") + len("constraints=") :], names)
    assert {name: constraint.pooling_factors for name, constraint in allowed.items()} == {
        name: constraint.pooling_factors for name, constraint in constraints.items()
    }
    free = planner(**{**arguments, "constraints": allowed})
    free.plan(model, SHARDERS)
    assert free.found is not None
    assert free.found.prediction.iteration_ms <= costs.iteration_ms * 1.01
    assert free.found.constraint_costs is None
