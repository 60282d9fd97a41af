"""Inputs of a plan: read from the module, given, or asked for; and refusals."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fused_embedding import FusedEmbeddingCollectionSharder
from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.pec_embedding import PECEmbeddingCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import PlannerError, ShardingOption
from torchrec.distributed.types import CacheParams
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.modules.feature_processor_ import (
    FeatureProcessor,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.pec_embedding_modules import PECEmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from predictor.errors import InputError
from shardopt.config import load_model
from shardopt.config.write import write_model
from shardopt.torchrec import ShardoptPerfModel, ShardoptPlanner, to_yaml
from shardopt.torchrec.read_module import not_priced
from tests.builders import a_table, a_workload
from tests.shardopt.torchrec.hook_models import (
    EFFORT,
    SHARDERS,
    Model,
    Offering,
    bag,
    factors,
    holding,
    planner,
    problem_of,
    sequences,
    topology,
    workload_of,
)
from tests.shardopt.torchrec.left_modules import LEFT, META, bags, remapped

FACTORS = {"a": 3.0, "b": 5.0}


def managed_bags() -> nn.Module:
    ebc = bags()
    return ManagedCollisionEmbeddingBagCollection(ebc, remapped(ebc.embedding_bag_configs()))


def managed_sequences() -> nn.Module:
    ec = sequences("a", "b")
    return ManagedCollisionEmbeddingCollection(ec, remapped(ec.embedding_configs()))


def fused_bags() -> nn.Module:
    tables = [bag("a", 1000), bag("b", 1000)]
    return FusedEmbeddingBagCollection(
        tables, torchrec.optim.RowWiseAdagrad, {"lr": 0.1}, device=META
    )


def fused_sequences() -> nn.Module:
    tables = sequences("a", "b").embedding_configs()
    return FusedEmbeddingCollection(tables, torch.optim.Adagrad, {"lr": 0.1}, device=META)


PLANNED = {
    "sequences": (lambda: sequences("a", "b"), EmbeddingCollectionSharder, "exact_sgd"),
    "fused bags": (fused_bags, FusedEmbeddingBagCollectionSharder, "exact_row_wise_adagrad"),
    "fused sequences": (fused_sequences, FusedEmbeddingCollectionSharder, "exact_adagrad"),
    "managed bags": (managed_bags, ManagedCollisionEmbeddingBagCollectionSharder, "exact_sgd"),
    "managed sequences": (
        managed_sequences,
        ManagedCollisionEmbeddingCollectionSharder,
        "exact_sgd",
    ),
    "prioritised sequences": (
        lambda: PECEmbeddingCollection(sequences("a", "b")),
        PECEmbeddingCollectionSharder,
        "exact_sgd",
    ),
}


@pytest.mark.parametrize("kind", PLANNED)
def test_planned_within_what_torchrec_offers(kind: str) -> None:
    make, sharder, optimizer = PLANNED[kind]
    model, by = holding(make()), [sharder()]
    hook = planner(constraints=factors(**FACTORS))
    plan = hook.plan(model, by).plan["x"]
    assert set(plan) == {"a", "b"}
    space = EmbeddingEnumerator(topology(), 512, factors(**FACTORS)).enumerate(model, by)
    offered = {(o.name, o.sharding_type, o.compute_kernel) for o in space}
    for name, sharding in plan.items():
        assert (name, sharding.sharding_type, sharding.compute_kernel) in offered
    tables = hook.found.problem.workload.tables
    assert {table.optimizer for table in tables} == {optimizer}
    assert {table.pooling for table in tables} == {"none" if "sequences" in kind else "sum"}
    assert [table.features[0].pooling_factor for table in tables if table.name == "b"] == [5.0]


@pytest.mark.parametrize("kind", LEFT)
def test_what_no_law_predicts_is_left_to_torchrec(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, sharder, words = LEFT[kind]
    model, by = holding(make()), [sharder()]
    constraints = factors(**FACTORS)
    hook = planner(constraints=constraints)
    plan = hook.plan(model, by)
    assert "left to TorchRec's own estimate" in caplog.text
    assert "not validated" in caplog.text
    assert words in caplog.text
    assert hook.found is None
    torchrec_planner = EmbeddingShardingPlanner(
        topology=topology(), batch_size=512, constraints=constraints, debug=False
    )
    assert str(plan) == str(torchrec_planner.plan(model, by))


class LaterOption(ShardingOption):
    """An option of a TorchRec that has one more setting."""

    def __init__(self, *args: Any, num_nodes: int | None = None, **more: Any) -> None:
        super().__init__(*args, **more)
        self.num_nodes = num_nodes


class LaterEnumerator(EmbeddingEnumerator):
    """Cuts the rows of table ``a`` over two hosts."""

    def enumerate(self, module: nn.Module, sharders: Any) -> list[ShardingOption]:
        options = super().enumerate(module, sharders)
        for option in options:
            option.__class__ = LaterOption
            option.num_nodes = 2 if option.name == "a" else None
        return options


def test_a_table_with_a_setting_of_a_later_torchrec_is_left_to_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hook = planner(enumerator=LaterEnumerator(topology(), 512, factors(**FACTORS)))
    assert set(hook.plan(Model(), SHARDERS).plan["ebc"]) == {"a", "b"}
    assert [table.name for table in hook.found.problem.workload.tables] == ["b"]
    assert "num_nodes=2" in caplog.text


# --- every field of ParameterConstraints ---------------------------------------------------------


def test_lists_follow_the_features_that_a_constraint_names() -> None:
    constraints = factors(b=2.0)
    constraints["a"] = ParameterConstraints(
        feature_names=["a_f1", "a_f0"],
        pooling_factors=[3.0, 5.0],
        num_poolings=[1.0, 2.0],
        batch_sizes=[1024, 512],
    )
    (a, _) = workload_of(Model(bag("a", features=2), bag("b")), constraints=constraints).tables
    poolings = {f.name: (f.pooling_factor, f.num_poolings) for f in a.features}
    # a feature with twice the batch is pooled twice a sample
    assert poolings == {"a_f0": (5.0, 2.0), "a_f1": (3.0, 2.0)}
    constraints["a"].feature_names = ["a_f0", "elsewhere"]  # TorchRec does not look at the names
    (a, _) = workload_of(Model(bag("a", features=2), bag("b")), constraints=constraints).tables
    assert [f.pooling_factor for f in a.features] == [3.0, 5.0]


def test_a_weighted_constraint_goes_behind_the_modules_word() -> None:
    constraints = factors(a=20.0, b=2.0)
    constraints["a"].is_weighted = True
    assert not any(t.weighted for t in workload_of(Model(), constraints=constraints).tables)
    constraints = factors(**FACTORS)
    constraints["a"].is_weighted = True
    by = [ManagedCollisionEmbeddingBagCollectionSharder()]
    tables = workload_of(holding(managed_bags()), by, constraints=constraints).tables
    assert {t.name: t.weighted for t in tables}["a"]


def test_a_table_of_another_device_is_passed_over_as_in_torchrec(
    tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    constraints = factors(a=20.0, b=2.0)
    constraints["a"].device_group, constraints["b"].device_group = "cuda", "cpu"
    words = "another device_group than the topology (cuda): 'b' (cpu)"
    plan = planner(constraints=constraints).plan(Model(), SHARDERS)
    ranks = topology()
    torchrec_planner = EmbeddingShardingPlanner(
        topology=ranks, batch_size=512, constraints=constraints, debug=False
    )
    assert (
        set(plan.plan["ebc"]) == set(torchrec_planner.plan(Model(), SHARDERS).plan["ebc"]) == {"a"}
    )
    assert caplog.text.count(words) == 1
    rated = ShardoptPerfModel(ranks, Model(), SHARDERS, 512, constraints=constraints)
    assert caplog.text.count(words) == 2
    options = EmbeddingEnumerator(ranks, 512, constraints).enumerate(Model(), SHARDERS)
    option = next(o for o in options if o.sharding_type == "table_wise")
    option.shards[0].rank = 0
    assert rated.rate([option]) > 0
    # a file is for any device, and says what was asked for
    to_yaml(Model(), tmp_path / "m.yaml", batch_size=512, constraints=constraints)
    written = load_model(tmp_path / "m.yaml")
    assert [t.constraints.device_group for t in written.tables] == ["cuda", "cpu"]
    constraints["b"].device_group = "cuda"
    tables = workload_of(Model(), constraints=constraints).tables
    assert {t.constraints.device_group for t in tables} == {"cuda"}


def test_the_plan_does_not_hang_on_the_order_of_a_tables_options() -> None:
    """It changes with PYTHONHASHSEED, as TorchRec's enumerator goes through sets; and kernels for
    inference, which some sharders offer, are planned in no order."""
    constraints = factors(a=20.0, b=2.0)
    for constraint in constraints.values():
        constraint.sharding_types = ["row_wise", "table_wise", "column_wise"]
    kernels = ["fused", "quant", "fused_uvm", "quant_uvm", "fused_uvm_caching"]
    sharder = Offering(**dict.fromkeys(constraints["a"].sharding_types, kernels))

    def planned(order: Callable[[str], Any]) -> Any:
        hook = planner(constraints=constraints, cache=False)
        enumerate_ = hook._enumerator.enumerate
        hook._enumerator.enumerate = lambda **arguments: sorted(
            enumerate_(**arguments),
            key=lambda o: (o.name, order(o.compute_kernel + o.sharding_type)),
        )
        return hook.plan(Model(bag("a", 100_000, 128), bag("b")), [sharder])

    first, second = planned(lambda kind: kind), planned(lambda kind: kind[::-1])
    assert str(first) == str(second)
    assert not [t for t in first.plan["ebc"].values() if t.compute_kernel.startswith("quant")]


# --- bad input ----------------------------------------------------------------------------------


def test_a_constraint_for_no_table_is_named(caplog: pytest.LogCaptureFixture) -> None:
    constraints = factors(table_a=20.0, table_b=2.0, table_c=1.0)
    workload_of(Model(bag("table_a"), bag("table_b")), constraints=constraints)
    assert "which this module does not have: 'table_c'" in caplog.text
    assert "did you mean" in caplog.text


def test_a_module_that_cannot_be_captured_counts_its_linear_layers_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    workload_of(Model())
    assert "linear layer" not in caplog.text

    class Undecided(Model):
        def forward(self, sparse: torch.Tensor) -> torch.Tensor:
            return super().forward(sparse) if sparse.sum() > 0 else sparse

    dense = workload_of(Undecided()).dense
    assert dense.linears == ((128, 32), (32, 1))
    assert "2 linear layers are counted, each once per sample, because" in caplog.text
    assert "op aten._local_scalar_dense" in caplog.text
    assert "if sparse.sum() > 0" in caplog.text


def test_nothing_to_shard_is_an_empty_plan() -> None:
    hook = planner()
    assert hook.plan(nn.Sequential(nn.Linear(2, 2)), SHARDERS).plan == {}
    assert hook.found is None
    table = holding(nn.EmbeddingBag(10, 4, device=META))  # no sharder for it is given
    assert hook.plan(table, SHARDERS).plan == {}


def test_options_and_space_can_be_asked_for() -> None:
    hook = planner()
    hook.plan(Model(), SHARDERS)
    if not hasattr(hook, "get_selected_options"):
        pytest.skip("came with torchrec 1.9")
    assert {o.name for o in hook.get_selected_options()} == {"a", "b"}
    assert len(hook.get_search_space()) > 2


class Reader(nn.Module):
    """A linear layer on what a module looks up."""

    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables
        self.layer = nn.Linear(128, 1, device=META)

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        """Logits."""
        output: torch.Tensor = self.layer(self.tables(ids).values())
        return output


class Other(FeatureProcessor):
    """Module of a user."""

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """Return the features unchanged."""
        return features


@pytest.mark.parametrize(
    ("processors", "expected"),
    [
        (PositionWeightedModuleCollection({"a_f0": 50}, META), {"a_f0": 50, "b_f0": 0}),
        (
            {"a_f0": PositionWeightedModule(50, META), "b_f0": Other()},
            {"a_f0": 50, "b_f0": 0},
        ),
    ],
)
def test_weights_by_position_are_read_and_written(
    tmp_path: Path, processors: Any, expected: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    tables = [bag("a", 1000), bag("b", 1000)]
    ebc = torchrec.EmbeddingBagCollection(tables=tables, device=META, is_weighted=True)
    module = Reader(FeatureProcessedEmbeddingBagCollection(ebc, processors))
    written = to_yaml(module, tmp_path / "m.yaml", batch_size=64, default_pooling_factor=5.0)
    read = load_model(tmp_path / "m.yaml")
    assert read == written
    assert all(t.weighted for t in read.tables)
    assert {f.name: f.position_weights for t in read.tables for f in t.features} == expected
    is_named = "feature processor Other of 'tables' is not priced" in caplog.text
    assert is_named == isinstance(processors, dict)
    head = (tmp_path / "m.yaml").read_text().split("schema:")[0]
    assert ("Not priced: the feature processor Other" in head) == is_named


def test_what_is_not_priced_is_said() -> None:
    (note,) = not_priced(holding(managed_bags()), ())
    assert "managed collision" in note
    assert "is not priced" in note
    (note,) = not_priced(holding(PECEmbeddingCollection(sequences("a"))), ())
    assert "PECEmbeddingCollection 'x'" in note
    constraints = factors(a=5.0, b=3.0)
    constraints["a"].num_poolings = [2.0]
    (note,) = not_priced(Model(), workload_of(Model(), constraints=constraints).tables)
    assert "variable batches of a_f0" in note
    assert not not_priced(Model(), workload_of(Model(), constraints=factors(**FACTORS)).tables)


def test_features_without_a_pooling_factor_are_all_named_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """TorchRec plans with 1; so do we, and say it once."""
    model = Model(bag("a", features=2), bag("b"), bag("c"))
    constraints = factors(b=2.0)
    words = r"3 features.*a_f0 \(table 'a'\), a_f1 \(table 'a'\), c_f0 \(table 'c'\)"
    with pytest.raises(PlannerError, match=rf"{words}.*default_pooling_factor.*constraints="):
        planner(constraints=constraints, strict=True).plan(model, SHARDERS)
    tables = workload_of(model, constraints=constraints)
    messages = [
        r for r in caplog.records if r.name == "shardopt" and "no pooling factor" in r.getMessage()
    ]
    assert len(messages) == 1
    assert re.search(words, caplog.text)
    factors_read = {f.name: f.pooling_factor for t in tables.tables for f in t.features}
    assert factors_read == {"a_f0": 1.0, "a_f1": 1.0, "b_f0": 2.0, "c_f0": 1.0}


def test_a_default_pooling_factor_answers_for_all(caplog: pytest.LogCaptureFixture) -> None:
    tables = workload_of(
        Model(), constraints=factors(a=2.0), default_pooling_factor=7.0, strict=True
    ).tables
    assert "no pooling factor" not in caplog.text
    assert {t.name: t.features[0].pooling_factor for t in tables} == {"a": 2.0, "b": 7.0}
    with pytest.raises(PlannerError, match="default_pooling_factor is 0"):
        planner(default_pooling_factor=0.0)


def test_a_constraint_for_other_reasons_gives_no_pooling_factor(tmp_path: Any) -> None:
    """TorchRec fills in 1.0, which an explicit 1.0 is not."""
    constraints = factors(a=20.0, b=2.0)
    constraints["b"] = ParameterConstraints(sharding_types=["table_wise"])
    with pytest.raises(InputError, match=r"no pooling factor.*: b_f0 .*1\.0 where.*one id"):
        planner(constraints=constraints, strict=True).plan(Model(), SHARDERS)
    with pytest.raises(InputError, match=r"no pooling factor.*: b_f0"):
        to_yaml(Model(), tmp_path / "m.yaml", batch_size=512, constraints=constraints)
    with pytest.raises(InputError, match=r"no pooling factor.*: b_f0"):
        planner(constraints=copy.deepcopy(constraints), strict=True).plan(Model(), SHARDERS)
    constraints["b"].pooling_factors = [1.0]
    tables = workload_of(Model(), constraints=constraints, strict=True).tables
    assert {t.name: t.features[0].pooling_factor for t in tables} == {"a": 20.0, "b": 1.0}


def test_a_model_files_pooling_factor_stays_beside_such_a_constraint(tmp_path: Any) -> None:
    to_yaml(Model(), tmp_path / "m.yaml", batch_size=512, constraints=factors(a=20.0, b=2.0))
    constraints = {"b": ParameterConstraints(sharding_types=["table_wise"])}
    tables = workload_of(Model(), model=tmp_path / "m.yaml", constraints=constraints).tables
    assert {t.name: t.features[0].pooling_factor for t in tables} == {"a": 20.0, "b": 2.0}


def test_one_pooling_factor_for_two_features_counts_as_in_torchrec(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """TorchRec does not look at the features: 20 ids per sample of the table."""
    (a, _) = workload_of(Model(bag("a", features=2), bag("b"))).tables
    assert [f.pooling_factor for f in a.features] == [10.0, 10.0]
    assert "2 features (a_f0, a_f1)" in caplog.text


def test_data_type_and_pooling_are_those_of_the_config() -> None:
    """The unsharded parameter is fp16."""
    config = bag("a")
    config.data_type, config.pooling = DataType.BF16, PoolingType.MEAN
    model = Model(config, bag("b"))
    assert model.ebc.embedding_bags["a"].weight.dtype is torch.float16
    tables = workload_of(model, constraints=factors(a=2.0, b=2.0)).tables
    assert [(t.data_type, t.pooling) for t in tables] == [("bf16", "mean"), ("fp32", "sum")]


def test_the_optimizer_comes_from_the_backward_or_the_fused_params() -> None:
    model = Model()
    apply_optimizer_in_backward(torchrec.optim.Adam, model.ebc.parameters(), {"lr": 0.1})
    assert {t.optimizer for t in workload_of(model).tables} == {"adam"}
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_ADAGRAD})
    assert {t.optimizer for t in workload_of(Model(), [sharder]).tables} == {"exact_adagrad"}


def test_a_model_file_says_what_no_module_holds(tmp_path: Any) -> None:
    written = a_workload(a_table("a", 100_000), a_table("b", 10_000), batch_size=64)
    write_model(tmp_path / "model.yaml", written)
    hook = ShardoptPlanner(
        topology(), hardware="a100-80gb", effort=EFFORT, debug=False, model=tmp_path / "model.yaml"
    )
    model = Model(bag("a", 100_000), bag("b"))
    for config, table in zip(model.ebc.embedding_bag_configs(), written.tables, strict=True):
        config.feature_names[:] = [f.name for f in table.features]
    workload = problem_of(hook, model).workload
    assert workload.batch_size == 64
    assert {f.pooling_factor for t in workload.tables for f in t.features} == {2.0}
    assert workload.dense == written.dense


def test_without_a_batch_size_torchrecs_default_is_taken_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    workload = workload_of(Model(), batch_size=None)
    assert workload.batch_size == 512
    assert "512" in caplog.text


def test_the_load_factor_of_the_sharder_is_the_users() -> None:
    """The plan leaves it where it is, and the prediction uses it."""
    constraints = factors(a=20.0, b=2.0)
    for constraint in constraints.values():
        constraint.compute_kernels = ["fused_uvm_caching"]
        constraint.sharding_types = ["table_wise"]
    sharder = EmbeddingBagCollectionSharder(fused_params={"cache_load_factor": 0.5})
    hook = planner(constraints=constraints)
    plan = hook.plan(Model(), [sharder])
    assert {table.cache_params for table in plan.plan["ebc"].values()} == {None}
    tables = hook.found.plan.tables.values()
    assert {table.cache_load_factor for table in tables} == {0.5}
    assert {t.constraints.cache_load_factor for t in hook.found.problem.workload.tables} == {0.5}


def test_constraints_of_the_enumerator_alone_count_in_full() -> None:
    """TorchEasyRec gives its constraints in this way."""
    constraints = {
        "a": ParameterConstraints(
            pooling_factors=[20.0],
            min_partition=16,
            sharding_types=["column_wise"],
            compute_kernels=["fused_uvm_caching"],
            cache_params=CacheParams(load_factor=0.3),
            enforce_hbm=True,
        ),
        "b": ParameterConstraints(pooling_factors=[2.0], num_poolings=[3.0]),
    }
    ranks = topology()
    hook = planner(
        topology=ranks, constraints=None, enumerator=EmbeddingEnumerator(ranks, 512, constraints)
    )
    plan = hook.plan(Model(), SHARDERS).plan["ebc"]
    assert plan["a"].cache_params.load_factor == 0.3
    a, b = hook.found.problem.workload.tables
    assert (a.features[0].pooling_factor, a.constraints.min_partition) == (20.0, 16)
    assert (a.constraints.cache_load_factor, a.constraints.enforce_hbm) == (0.3, True)
    assert (b.features[0].pooling_factor, b.features[0].num_poolings) == (2.0, 3.0)
    planned = hook.found.plan.tables["a"]
    assert planned.cache_load_factor == 0.3
    assert [s.size[1] for s in planned.shards] == [
        s.shard_sizes[1] for s in plan["a"].sharding_spec.shards
    ]


def test_types_that_are_priced_as_another_are_told() -> None:
    config = torchrec.EmbeddingBagConfig(
        name="t", num_embeddings=10_000, embedding_dim=64, feature_names=["f"]
    )
    for kind, expected in (
        (DataType.FP16, 0),
        (DataType.INT8, 1),
        (DataType.NFP8, 0),
        (DataType.INT2, 1),
    ):
        config.data_type = kind
        module = torchrec.EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
        tables = [
            a_table("t", data_type=kind.value.lower() if kind is not DataType.INT2 else "fp16")
        ]
        notes = [line for line in not_priced(module, tables) if "'t'" in line]
        assert len(notes) == expected
