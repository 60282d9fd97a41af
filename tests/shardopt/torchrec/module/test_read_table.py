"""What a plan is made from: read from the module, given, or asked for."""

from __future__ import annotations

import copy
import logging
import re
from typing import Any

import pytest

pytest.importorskip("torchrec")

import torch
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import CacheParams
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from predictor.errors import InputError
from predictor.predict import predict
from shardopt.config.write import write_model
from shardopt.torchrec import ShardoptPlanner, to_yaml
from tests.builders import a_table, a_workload
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


def test_features_without_a_pooling_factor_are_all_named_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """TorchRec plans with 1; so do we, and say it once."""
    model = Model(bag("a", features=2), bag("b"), bag("c"))
    told = factors(b=2.0)
    words = r"3 features.*a_f0 \(table 'a'\), a_f1 \(table 'a'\), c_f0 \(table 'c'\)"
    with pytest.raises(PlannerError, match=rf"{words}.*default_pooling_factor.*constraints="):
        planner(constraints=told, strict=True).plan(model, SHARDERS)
    with caplog.at_level(logging.WARNING, "shardopt"):
        tables = workload_of(model, constraints=told)
    said = [
        r for r in caplog.records if r.name == "shardopt" and "no pooling factor" in r.getMessage()
    ]
    assert len(said) == 1
    assert re.search(words, caplog.text)
    found = {f.name: f.pooling_factor for t in tables.tables for f in t.features}
    assert found == {"a_f0": 1.0, "a_f1": 1.0, "b_f0": 2.0, "c_f0": 1.0}


def test_a_default_pooling_factor_answers_for_all(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "shardopt"):
        tables = workload_of(
            Model(), constraints=factors(a=2.0), default_pooling_factor=7.0, strict=True
        ).tables
    assert "no pooling factor" not in caplog.text
    assert {t.name: t.features[0].pooling_factor for t in tables} == {"a": 2.0, "b": 7.0}
    with pytest.raises(PlannerError, match="default_pooling_factor is 0"):
        planner(default_pooling_factor=0.0)


def test_a_constraint_for_other_reasons_gives_no_pooling_factor(tmp_path: Any) -> None:
    """TorchRec fills in 1.0, which an explicit 1.0 is not."""
    told = factors(a=20.0, b=2.0)
    told["b"] = ParameterConstraints(sharding_types=["table_wise"])
    with pytest.raises(InputError, match=r"no pooling factor.*: b_f0 .*1\.0 where.*one id"):
        planner(constraints=told, strict=True).plan(Model(), SHARDERS)
    with pytest.raises(InputError, match=r"no pooling factor.*: b_f0"):
        to_yaml(Model(), tmp_path / "m.yaml", batch_size=512, constraints=told)
    with pytest.raises(InputError, match=r"no pooling factor.*: b_f0"):
        planner(constraints=copy.deepcopy(told), strict=True).plan(Model(), SHARDERS)
    told["b"].pooling_factors = [1.0]
    tables = workload_of(Model(), constraints=told, strict=True).tables
    assert {t.name: t.features[0].pooling_factor for t in tables} == {"a": 20.0, "b": 1.0}


def test_a_model_files_pooling_factor_stays_beside_such_a_constraint(tmp_path: Any) -> None:
    to_yaml(Model(), tmp_path / "m.yaml", batch_size=512, constraints=factors(a=20.0, b=2.0))
    told = {"b": ParameterConstraints(sharding_types=["table_wise"])}
    tables = workload_of(Model(), model=tmp_path / "m.yaml", constraints=told).tables
    assert {t.name: t.features[0].pooling_factor for t in tables} == {"a": 20.0, "b": 2.0}


def test_one_pooling_factor_for_two_features_counts_as_in_torchrec(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """TorchRec does not look at the features: 20 ids per sample of the table."""
    with caplog.at_level(logging.WARNING, "shardopt"):
        (a, _) = workload_of(Model(bag("a", features=2), bag("b"))).tables
    assert [f.pooling_factor for f in a.features] == [10.0, 10.0]
    assert "2 features (a_f0, a_f1)" in caplog.text


def test_features_and_pooling_come_from_the_config() -> None:
    config = bag("a", features=2)
    config.pooling = PoolingType.MEAN
    told = {**factors(b=2.0), "a": ParameterConstraints(pooling_factors=[3.0, 5.0])}
    table = workload_of(Model(config, bag("b")), constraints=told).tables
    (a,) = (t for t in table if t.name == "a")
    assert [(f.name, f.pooling_factor) for f in a.features] == [("a_f0", 3.0), ("a_f1", 5.0)]
    assert a.pooling == "mean"


def test_the_data_type_is_that_of_the_config_not_of_the_unsharded_parameter() -> None:
    config = bag("a")
    config.data_type = DataType.BF16
    model = Model(config, bag("b"))
    assert model.ebc.embedding_bags["a"].weight.dtype is torch.float16
    found = {
        t.name: t.data_type for t in workload_of(model, constraints=factors(a=2.0, b=2.0)).tables
    }
    assert found == {"a": "bf16", "b": "fp32"}


def test_the_optimizer_comes_from_the_backward() -> None:
    model = Model()
    apply_optimizer_in_backward(torchrec.optim.Adam, model.ebc.parameters(), {"lr": 0.1})
    assert {t.optimizer for t in workload_of(model).tables} == {"adam"}


def test_the_optimizer_comes_from_the_fused_params_too() -> None:
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_ADAGRAD})
    assert {t.optimizer for t in workload_of(Model(), [sharder]).tables} == {"exact_adagrad"}


def test_the_dense_layers_are_read_and_cost_time() -> None:
    wide = Model()
    wide.over = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096))
    workload = workload_of(Model())
    products = [c.name for c in workload.dense.program(workload).forward if hasattr(c, "name")]
    assert products.count("addmm") == 2
    made = planner(batch_size=8192)
    made.plan(Model(), SHARDERS)
    other = problem_of(planner(batch_size=8192), wide)
    plan = made.found.plan
    slower = predict(other.workload, other.topology, other.hardware, plan).iteration_ms
    assert slower > made.found.result.best.iteration_ms


def test_a_model_file_says_what_no_module_holds(tmp_path: Any) -> None:
    known = a_workload(a_table("a", 100_000), a_table("b", 10_000), batch_size=64)
    write_model(tmp_path / "model.yaml", known)
    made = ShardoptPlanner(
        topology(), hardware="a100-80gb", effort=EFFORT, debug=False, model=tmp_path / "model.yaml"
    )
    model = Model(bag("a", 100_000), bag("b"))
    for config, of in zip(model.ebc.embedding_bag_configs(), known.tables, strict=True):
        config.feature_names[:] = [f.name for f in of.features]
    workload = problem_of(made, model).workload
    assert workload.batch_size == 64
    assert {f.pooling_factor for t in workload.tables for f in t.features} == {2.0}
    assert workload.dense == known.dense


def test_without_a_batch_size_torchrecs_default_is_taken_and_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "shardopt"):
        workload = workload_of(Model(), batch_size=None)
    assert workload.batch_size == 512
    assert "512" in caplog.text


def test_bandwidths_in_bytes_per_second_are_told_and_not_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("WARNING", "shardopt"):
        made = planner(topology=topology(intra_host_bw=450e9))
    assert "intra_host_bw=4.5e+08" in caplog.text
    assert str(made.plan(Model(), SHARDERS)) == str(planner().plan(Model(), SHARDERS))


def test_the_load_factor_of_the_sharder_is_the_users() -> None:
    """The plan leaves it where it is, and the prediction uses it."""
    told = factors(a=20.0, b=2.0)
    for constraint in told.values():
        constraint.compute_kernels = ["fused_uvm_caching"]
        constraint.sharding_types = ["table_wise"]
    sharder = EmbeddingBagCollectionSharder(fused_params={"cache_load_factor": 0.5})
    made = planner(constraints=told)
    plan = made.plan(Model(), [sharder])
    assert {table.cache_params for table in plan.plan["ebc"].values()} == {None}
    tables = made.found.plan.tables.values()
    assert {table.cache_load_factor for table in tables} == {0.5}
    assert {t.constraints.cache_load_factor for t in made.found.problem.workload.tables} == {0.5}


def test_constraints_of_the_enumerator_alone_count_in_full() -> None:
    """As TorchEasyRec gives them."""
    told = {
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
    made = planner(
        topology=ranks, constraints=None, enumerator=EmbeddingEnumerator(ranks, 512, told)
    )
    plan = made.plan(Model(), SHARDERS).plan["ebc"]
    assert plan["a"].cache_params.load_factor == 0.3
    a, b = made.found.problem.workload.tables
    assert (a.features[0].pooling_factor, a.constraints.min_partition) == (20.0, 16)
    assert (a.constraints.cache_load_factor, a.constraints.enforce_hbm) == (0.3, True)
    assert (b.features[0].pooling_factor, b.features[0].num_poolings) == (2.0, 3.0)
    planned = made.found.plan.tables["a"]
    assert planned.cache_load_factor == 0.3
    assert [s.size[1] for s in planned.shards] == [
        s.shard_sizes[1] for s in plan["a"].sharding_spec.shards
    ]
