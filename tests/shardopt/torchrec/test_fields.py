"""Fields of `ParameterSharding` that a plan only carries, through JSON and back."""

import json
from typing import Any

import pytest

pytest.importorskip("torchrec")

import torch
from fbgemm_gpu.tbe.monitoring import StdLogStatsReporterConfig
from torchrec import EmbeddingBagCollection
from torchrec.distributed.planner.shard_estimators import EmbeddingOffloadStats
from torchrec.distributed.types import (
    BoundsCheckMode,
    CacheAlgorithm,
    CacheParams,
    KeyValueParams,
    KVZCHTBEConfig,
    MultiPassPrefetchConfig,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.types import DataType

from predictor.errors import PlanError
from predictor.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.plan_json import plan_from_dict, plan_to_dict
from shardopt.torchrec.convert import from_torchrec, to_torchrec

ROWS, COLUMNS = 10, 16


def collection() -> EmbeddingBagCollection:
    """One table."""
    config = EmbeddingBagConfig(
        name="t0", num_embeddings=ROWS, embedding_dim=COLUMNS, feature_names=["f"]
    )
    return EmbeddingBagCollection(tables=[config], device=torch.device("meta"))


def plan_of(**parameters: Any) -> ShardingPlan:
    """The table on rank 0, with the given fields."""
    shards = (Shard(0, (0, 0), (ROWS, COLUMNS)),)
    table = TablePlan(ShardingType.TABLE_WISE, ComputeKernel.FUSED, shards, parameters=parameters)
    return ShardingPlan({"t0": table}, 1, 1)


FIELDS: list[dict[str, Any]] = [
    {"enforce_hbm": True, "stochastic_rounding": False},
    {"bounds_check_mode": BoundsCheckMode.V2_WARNING, "output_dtype": DataType.FP16},
    {
        "cache_params": CacheParams(
            algorithm=CacheAlgorithm.LFU,
            load_factor=0.25,
            reserved_memory=1.5,
            precision=DataType.BF16,
            prefetch_pipeline=True,
            multipass_prefetch_config=MultiPassPrefetchConfig(num_passes=3),
        )
    },
    {
        "key_value_params": KeyValueParams(
            ssd_storage_directory="/data",
            gather_ssd_cache_stats=True,
            stats_reporter_config=StdLogStatsReporterConfig(interval=5),
            use_passed_in_path=False,
            l2_cache_size=3,
            kvzch_tbe_config=KVZCHTBEConfig(
                kvzch_eviction_trigger_mode=1,
                optimizer_state_dtypes_for_st=frozenset({("momentum", 1), ("exp_avg", 2)}),
            ),
            load_ckpt_without_opt=True,
            ps_hosts=(("::1", 2000), ("::1", 2001)),
            ps_client_thread_num=4,
        )
    },
]


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: "+".join(fields))
def test_every_other_field_there_and_back(fields: dict[str, Any]) -> None:
    model = collection()
    theirs = to_torchrec(plan_of(), model)
    for name, value in fields.items():
        setattr(theirs.plan[""]["t0"], name, value)
    ours = from_torchrec(theirs, model)
    stored = plan_from_dict(json.loads(json.dumps(plan_to_dict(ours))), where="p")
    assert stored.tables == ours.tables
    assert to_torchrec(stored, model).plan == theirs.plan


def test_cache_statistics_there_and_back() -> None:
    stats = EmbeddingOffloadStats(0.5, 100, torch.tensor([3, 2, 1]), ROWS)
    model = collection()
    theirs = to_torchrec(plan_of(), model)
    theirs.plan[""]["t0"].cache_params = CacheParams(load_factor=0.3, stats=stats)
    ours = from_torchrec(theirs, model)
    assert ours.tables["t0"].cache_load_factor == 0.3
    back = to_torchrec(plan_from_dict(plan_to_dict(ours), where="p"), model)
    found = back.plan[""]["t0"].cache_params.stats
    assert found.hist.tolist() == [3, 2, 1]
    assert (found.cacheability, found.expected_lookups, found.height) == (0.5, 100, ROWS)
    assert found.expected_miss_rate(0.5) == stats.expected_miss_rate(0.5)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"bounds_check_mode": "WARN"}, "did you mean 'WARNING'"),
        ({"output_dtype": "fp32"}, "FP32"),
        ({"enforce_hbm": "yes"}, "true, false and null"),
        ({"cache_params": {"load_facto": 0.2}}, "did you mean 'load_factor'"),
        ({"cache_params": {"algorithm": "FIFO"}}, "LRU, LFU"),
        ({"cache_params": {"stats": {"height": 3}}}, "cannot be used"),
        ({"key_value_params": {"stats_reporter_config": {"type": "X"}}}, "StdLogStatsReporter"),
        ({"colour": 1}, "unknown key 'colour'"),
    ],
)
def test_field_values_that_cannot_be(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words) as caught:
        to_torchrec(plan_of(**parameters), collection())
    assert "table 't0'" in str(caught.value)
