"""Fields of `ParameterSharding` that a plan only carries, through JSON and back."""

import json
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

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
    ParameterSharding,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.types import DataType

from predictor.errors import PlanError
from predictor.model import plan_json
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.plan_json import plan_from_dict, plan_to_dict
from shardopt.torchrec.plan.convert import from_torchrec, to_torchrec

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


CACHE = CacheParams(
    algorithm=CacheAlgorithm.LFU,
    load_factor=0.25,
    reserved_memory=1.5,
    precision=DataType.BF16,
    prefetch_pipeline=True,
    multipass_prefetch_config=MultiPassPrefetchConfig(num_passes=3, min_splitable_pass_size=7),
)
KVZCH = KVZCHTBEConfig(
    kvzch_eviction_trigger_mode=1,
    eviction_free_mem_threshold_gb=3,
    eviction_free_mem_check_interval_batch=5,
    threshold_calculation_bucket_stride=0.5,
    threshold_calculation_bucket_num=None,
    load_ckpt_without_opt=True,
    optimizer_type_for_st="adam",
    optimizer_state_dtypes_for_st=frozenset({("momentum", 1), ("exp_avg", 2)}),
)
KEY_VALUE = KeyValueParams(
    ssd_storage_directory="/data",
    ssd_rocksdb_write_buffer_size=1,
    ssd_rocksdb_shards=2,
    gather_ssd_cache_stats=True,
    stats_reporter_config=StdLogStatsReporterConfig(interval=5),
    use_passed_in_path=False,
    l2_cache_size=3,
    max_l1_cache_size=4,
    enable_async_update=False,
    bulk_init_chunk_size=5,
    lazy_bulk_init_enabled=True,
    enable_raw_embedding_streaming=False,
    res_store_shards=6,
    kvzch_tbe_config=KVZCH,
    load_ckpt_without_opt=True,
    ps_hosts=(("::1", 2000), ("::1", 2001)),
    ps_client_thread_num=4,
    ps_max_key_per_request=8,
    ps_max_local_index_length=9,
)
FIELDS: list[dict[str, Any]] = [
    {"enforce_hbm": True, "stochastic_rounding": False},
    {"bounds_check_mode": BoundsCheckMode.V2_WARNING, "output_dtype": DataType.FP16},
    {"cache_params": CACHE},
    {"key_value_params": KEY_VALUE},
]


def test_no_field_of_this_torchrec_is_left_out_above() -> None:
    """Of the installed version, whichever it is."""
    carried = {name for given in FIELDS for name in given}
    read = {"sharding_type", "compute_kernel", "ranks", "sharding_spec"}
    assert {f.name for f in fields(ParameterSharding)} == carried | read
    assert at_default(CACHE) == {"stats"}  # test_cache_statistics_there_and_back
    assert at_default(KEY_VALUE) == set()
    assert at_default(CACHE.multipass_prefetch_config) == set()
    assert at_default(KVZCH) == {"enrichment_policy"}  # test_named_tuples_are_not_lists


def at_default(value: Any) -> set[str]:
    """Names of the fields that nothing was given for."""
    names = getattr(value, "_fields", None) or [f.name for f in fields(value)]
    default = type(value)()
    return {name for name in names if getattr(value, name) == getattr(default, name)}


@pytest.mark.parametrize("given", FIELDS, ids="+".join)
def test_every_other_field_there_and_back(given: dict[str, Any]) -> None:
    model = collection()
    theirs = to_torchrec(plan_of(), model)
    for name, value in given.items():
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


class Named(NamedTuple):
    """As FBGEMM's EnrichmentPolicy, which some versions lack."""

    provider: str


def test_named_tuples_are_not_lists() -> None:
    model = collection()
    theirs = to_torchrec(plan_of(), model)
    config: Any = KVZCHTBEConfig(enrichment_policy=Named("x"))  # type: ignore[arg-type]
    theirs.plan[""]["t0"].key_value_params = KeyValueParams(kvzch_tbe_config=config)
    with pytest.raises(PlanError, match=r"kvzch_tbe_config.enrichment_policy: a Named cannot be"):
        from_torchrec(theirs, model)


@dataclass
class Sharding(ParameterSharding):
    """As dynamicemb's, which bring lookups of their own."""

    capacity: int = 3


@pytest.mark.parametrize("kernel", ["fused", "customized_kernel"])
def test_subclasses_are_refused_not_flattened(kernel: str) -> None:
    model = collection()
    theirs = to_torchrec(plan_of(), model)
    plain = theirs.plan[""]["t0"]
    given = {f.name: getattr(plain, f.name) for f in fields(plain)} | {"compute_kernel": kernel}
    theirs.plan[""]["t0"] = Sharding(**given)
    with pytest.raises(PlanError, match=r"table 't0'.*has a Sharding, .*plan\.plan\[path\]"):
        from_torchrec(theirs, model)


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


@pytest.mark.parametrize(
    ("kind", "known"),
    [
        (DataType, plan_json.DATA_TYPES),
        (BoundsCheckMode, plan_json.BOUNDS_CHECKS),
        (CacheAlgorithm, plan_json.ALGORITHMS),
    ],
)
def test_every_name_of_torchrec_is_read(kind: Any, known: tuple[str, ...]) -> None:
    assert set(kind.__members__) <= set(known)
