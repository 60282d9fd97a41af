"""Plans to TorchRec and back, field by field, and what is refused on the way."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from fbgemm_gpu.tbe.monitoring import StdLogStatsReporterConfig
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.shard_estimators import EmbeddingOffloadStats
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.quant_embeddingbag import QuantEmbeddingBagCollectionSharder
from torchrec.distributed.types import (
    BoundsCheckMode,
    CacheAlgorithm,
    CacheParams,
    KeyValueParams,
    KVZCHTBEConfig,
    MultiPassPrefetchConfig,
    ParameterSharding,
)
from torchrec.distributed.types import ShardingPlan as TorchrecPlan
from torchrec.distributed.types import ShardingType as TorchrecType
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.pec_embedding_modules import PECEmbeddingCollection
from torchrec.types import DataType

from predictor.errors import PlanError, ShardoptError
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.plan_json import plan_from_dict, plan_to_dict
from shardopt.api.request import Machine
from shardopt.api.setting import resolve
from shardopt.config.write import write_model
from shardopt.extras import needs_torchrec
from shardopt.torchrec.convert import from_torchrec, to_torchrec
from tests.builders import a_table, a_workload
from tests.distributed.training_case import table_plan
from tests.shardopt.torchrec.hook_models import holding
from tests.shardopt.torchrec.left_modules import quantised

T = ShardingType


ROWS, COLUMNS, WORLD, LOCAL = 10, 16, 4, 2


META = torch.device("meta")


# rank, (row, column), (rows, columns)
Cut = tuple[int, tuple[int, int], tuple[int, int]]


def config(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "num_embeddings": ROWS,
        "embedding_dim": COLUMNS,
        "feature_names": [f"f_{name}"],
    }


def bags(*names: str, pooling: PoolingType = PoolingType.SUM) -> EmbeddingBagCollection:
    tables = [EmbeddingBagConfig(**config(name), pooling=pooling) for name in names]
    return EmbeddingBagCollection(tables=tables, device=META)


def sequences(*names: str) -> EmbeddingCollection:
    return EmbeddingCollection(
        tables=[EmbeddingConfig(**config(name)) for name in names], device=META
    )


def sharded(kind: ShardingType, cuts: Sequence[Cut], kernel: str = "fused") -> TablePlan:
    shards = tuple(Shard(*cut) for cut in cuts)
    return TablePlan(kind, ComputeKernel(kernel), shards)


def plan_of(*tables: TablePlan, **named: TablePlan) -> ShardingPlan:
    """A plan of tables t0, t1, ... and those named."""
    numbered = {f"t{i}": table for i, table in enumerate(tables)}
    return ShardingPlan({**numbered, **named}, WORLD, LOCAL)


WHOLE = ((0, 0), (ROWS, COLUMNS))


BLOCKS: list[Cut] = [
    (0, (0, 0), (3, 16)),
    (1, (3, 0), (3, 16)),
    (2, (6, 0), (3, 16)),
    (3, (9, 0), (1, 16)),
]


ONE = {
    kind: table_plan(a_table("t", ROWS, COLUMNS, module="ebc"), kind, 3, WORLD, LOCAL)
    for kind in ShardingType
}
"""A table sharded in every way: column-wise on ranks 3 and 0, by host on ranks 2 and 3."""
ONE_OF_EACH = plan_of(*ONE.values())


def same(one: TorchrecPlan, other: TorchrecPlan) -> bool:
    """Equality of TorchRec plans; their specs compare by their shards."""
    return one.plan == other.plan and str(one) == str(other)


def test_every_sharding_type_there_and_back() -> None:
    assert {kind.value for kind in ONE} == {kind.value for kind in TorchrecType}
    model = nn.ModuleDict({"ebc": bags(*ONE_OF_EACH.tables)})
    there = to_torchrec(ONE_OF_EACH, model, device="cuda")
    back = from_torchrec(there, model, world_size=WORLD)
    assert back.tables == ONE_OF_EACH.tables
    assert (back.world_size, back.local_world_size) == (WORLD, LOCAL)
    assert same(to_torchrec(back, model), there)


@pytest.mark.parametrize("kind", [k for k in ShardingType if k is not T.GRID_SHARD])
def test_torchrecs_own_plans_survive(kind: ShardingType) -> None:
    """The plans of TorchRec's planner, where shapes and ranks are TorchRec's choice."""
    model = nn.ModuleDict({"a": bags("t0", "t1"), "b": bags("t0", "t2")})
    constraints = {
        name: ParameterConstraints(sharding_types=[kind.value], min_partition=8)
        for name in ("t0", "t1", "t2")
    }
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=WORLD, local_world_size=LOCAL, compute_device="cuda"),
        constraints=constraints,
        debug=False,
    )
    theirs = planner.plan(model, [EmbeddingBagCollectionSharder()])
    ours = from_torchrec(theirs, model, world_size=WORLD, local_world_size=LOCAL)
    assert set(ours.tables) == {"a/t0", "t1", "b/t0", "t2"}
    assert same(to_torchrec(ours, model), theirs)
    stored = plan_from_dict(json.loads(json.dumps(plan_to_dict(ours))), where="p")
    assert same(to_torchrec(stored, model), theirs)


def test_what_cannot_be_written() -> None:
    model = bags("t0")
    theirs = to_torchrec(plan_of(ONE[T.TABLE_WISE]), model)
    sharding = theirs.plan[""]["t0"]
    sharding.output_dtype = object()
    with pytest.raises(PlanError, match="output_dtype: a object cannot be written"):
        from_torchrec(theirs, model)
    sharding.output_dtype = None
    sharding.compute_kernel = "quant"
    with pytest.raises(PlanError, match="compute_kernel is 'quant'"):
        from_torchrec(theirs, model)
    sharding.compute_kernel = "fused"
    sharding.sharding_spec = None
    with pytest.raises(PlanError, match="no EnumerableShardingSpec"):
        from_torchrec(theirs, model)
    with pytest.raises(PlanError, match="'t0' of module '' is not in EmbeddingBagCollection"):
        from_torchrec(theirs, bags("t1"))


REFUSED: list[tuple[TablePlan, str]] = [
    (sharded(T.TABLE_WISE, [(0, (0, 0), (9, 16))]), "rows 9..9"),
    (sharded(T.TABLE_WISE, [(0, (0, 0), (11, 16))]), "outside the table of 10 rows"),
    (replace(ONE[T.DATA_PARALLEL], compute_kernel=ComputeKernel.FUSED), "dense only, not fused"),
    (replace(ONE[T.DATA_PARALLEL], shards=ONE[T.DATA_PARALLEL].shards[:2]), r"0\.\.3"),
    (sharded(T.ROW_WISE, [(0, (0, 0), (5, 16)), (1, (5, 0), (5, 16))]), r"\[0, 1, 2, 3\]"),
    (sharded(T.ROW_WISE, [(3 - r, *where) for r, *where in BLOCKS]), "in that order only"),
    (
        sharded(
            T.ROW_WISE,
            [(i, (first, 0), (size, 16)) for i, (first, size) in enumerate([(0, 3), (3, 3)])]
            + [(2, (6, 0), (2, 16)), (3, (8, 0), (2, 16))],
        ),
        "blocks of 3, here 3 rows from row 6",
    ),
    (
        sharded(T.TABLE_ROW_WISE, [(1, (0, 0), (5, 16)), (2, (5, 0), (5, 16))]),
        r"\[0, 1\] in that order",
    ),
    (sharded(T.TABLE_ROW_WISE, BLOCKS), r"\[0, 1\] in that order"),
    (
        sharded(T.TABLE_COLUMN_WISE, [(1, (0, 0), (ROWS, 8)), (2, (0, 8), (ROWS, 8))]),
        "within one host",
    ),
    (
        sharded(
            T.GRID_SHARD,
            [(r, (r // 2 * 5, r % 2 * 8), (5, 8)) for r in range(4)],
        ),
        r"grid_shard \(columns from 0\) shards are on ranks \[0, 2\]",
    ),
    (sharded(T.COLUMN_WISE, [(0, (0, 0), (ROWS, 6)), (1, (0, 6), (ROWS, 10))]), "multiples of 4"),
]


@pytest.mark.parametrize(("table", "words"), REFUSED)
def test_what_torchrec_cannot_run(table: TablePlan, words: str) -> None:
    with pytest.raises(PlanError, match=words) as caught:
        to_torchrec(plan_of(table), bags("t0"))
    assert "table 't0'" in str(caught.value)


def test_more_that_torchrec_can_run() -> None:
    """DlrmShape that differ, several shards on a rank, any order in the file, empty tails."""
    wide = sharded(T.COLUMN_WISE, [(0, (0, 4), (ROWS, 12)), (0, (0, 0), (ROWS, 4))])
    spec = to_torchrec(plan_of(wide), bags("t0")).plan[""]["t0"].sharding_spec
    assert [shard.shard_offsets for shard in spec.shards] == [[0, 0], [0, 4]]
    odd = sharded(T.COLUMN_WISE, [(0, (0, 0), (ROWS, 6)), (1, (0, 6), (ROWS, 10))], "dense")
    to_torchrec(plan_of(odd), bags("t0"))
    both = [(rank, (5 * rank, column), (5, 8)) for column in (0, 8) for rank in (0, 1)]
    to_torchrec(plan_of(sharded(T.GRID_SHARD, both)), bags("t0"))
    tail = [(r, (min(2 * r, 10), 0), (2 if r < 5 else 0, 16)) for r in range(8)]
    eight = replace(plan_of(sharded(T.ROW_WISE, tail)), world_size=8, local_world_size=8)
    spec = to_torchrec(eight, bags("t0")).plan[""]["t0"].sharding_spec
    assert [shard.shard_offsets[0] for shard in spec.shards] == [0, 2, 4, 6, 8, 10, 10, 10]


def test_an_nvlink_domain_of_two_hosts() -> None:
    plan = plan_of(sharded(T.TABLE_ROW_WISE, BLOCKS))
    theirs = to_torchrec(plan, bags("t0"), intra_group_size=WORLD, device="cuda")
    ours = from_torchrec(theirs, bags("t0"))
    assert (ours.world_size, ours.local_world_size) == (WORLD, LOCAL)
    assert ours.meta["intra_group_size"] == WORLD
    assert same(to_torchrec(ours, bags("t0")), theirs)


def test_embedding_collections() -> None:
    halves = ONE[T.COLUMN_WISE]
    quarters = sharded(T.COLUMN_WISE, [(i, (0, 4 * i), (ROWS, 4)) for i in range(4)])
    uneven = sharded(T.COLUMN_WISE, [(0, (0, 0), (ROWS, 4)), (1, (0, 4), (ROWS, 12))])
    replicated = ONE[T.DATA_PARALLEL]
    to_torchrec(plan_of(halves, halves), sequences("t0", "t1"))
    to_torchrec(plan_of(replicated), sequences("t0"), device="cuda")
    for plan, words in [
        (plan_of(ONE[T.TABLE_ROW_WISE]), "use data_parallel"),
        (plan_of(uneven), "one width for all shards"),
        (plan_of(replicated), "dense kernel cannot look up an EmbeddingCollection on CPU"),
    ]:
        with pytest.raises(PlanError, match=words):
            to_torchrec(plan, sequences("t0"), device="cpu")
    with pytest.raises(PlanError, match=r"\[4, 8\] columns"):
        to_torchrec(plan_of(halves, quarters), sequences("t0", "t1"))


def test_means_that_torchrec_gets_wrong() -> None:
    rows, whole = ONE[T.ROW_WISE], ONE[T.TABLE_WISE]
    means = bags("t0", "t1", pooling=PoolingType.MEAN)
    to_torchrec(plan_of(rows, rows), means)
    to_torchrec(plan_of(whole, whole), means)
    with pytest.raises(PlanError, match="divide the output of 't1'"):
        to_torchrec(plan_of(rows, whole), means)
    with pytest.raises(PlanError, match="wrong for pooling mean"):
        to_torchrec(plan_of(ONE[T.GRID_SHARD], whole), means)


class Model(nn.Module):
    """Two towers with a table of the same name each, and one table of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.ModuleDict({"ebc": bags("t0")})
        self.item = nn.ModuleDict({"ebc": bags("t0", "t1")})


def test_tables_are_found_by_name_then_module() -> None:
    table = ONE[T.TABLE_WISE]
    named = {"user/t0": replace(table, module="user"), "t1": replace(table, module="anything")}
    with pytest.raises(PlanError, match=r"'user/t0' may mean 'user\.ebc/t0' or 'item\.ebc/t0'"):
        to_torchrec(plan_of(**named), Model())
    paths = {
        "user.ebc/t0": replace(table, module="user.ebc"),
        "item.ebc/t0": replace(table, module="item.ebc"),
        "t1": table,
    }
    theirs = to_torchrec(plan_of(**paths), Model())
    assert {path: list(tables) for path, tables in theirs.plan.items()} == {
        "user.ebc": ["t0"],
        "item.ebc": ["t0", "t1"],
    }
    below = nn.ModuleDict({"model": Model()})  # a path is also right when it is the end of one
    assert set(to_torchrec(plan_of(**paths), below).plan) == {"model.user.ebc", "model.item.ebc"}


def test_tables_that_do_not_match() -> None:
    table = ONE[T.TABLE_WISE]
    with pytest.raises(PlanError, match=r"'t0' is not in EmbeddingBagCollection.*'t00'"):
        to_torchrec(plan_of(table), bags("t00"))
    with pytest.raises(PlanError, match="no shards for 't1' of EmbeddingBagCollection"):
        to_torchrec(plan_of(table), bags("t0", "t1"))


def test_other_kinds_of_module() -> None:
    table = ONE[T.TABLE_WISE]
    fused = FusedEmbeddingBagCollection(
        bags("t0").embedding_bag_configs(), torch.optim.SGD, {"lr": 0.1}, device=META
    )
    weighted = EmbeddingBagCollection(
        tables=bags("t1").embedding_bag_configs(), is_weighted=True, device=META
    )
    processed = FeatureProcessedEmbeddingBagCollection(
        weighted, PositionWeightedModuleCollection({"f_t1": 4}, device=META)
    )
    prioritised = PECEmbeddingCollection(sequences("t3"))
    model = nn.ModuleDict(
        {"fused": fused, "processed": processed, "ec": sequences("t2"), "pec": prioritised}
    )
    plan = plan_of(table, table, table, table)
    theirs = to_torchrec(plan, model)
    assert list(theirs.plan) == ["fused", "processed", "ec", "pec"]
    assert same(to_torchrec(from_torchrec(theirs, model, world_size=4), model), theirs)
    assert "ec" in {
        path
        for path, child in model.named_modules()
        if isinstance(child, EmbeddingCollectionSharder().module_type)
    }


@pytest.mark.parametrize("kind", [T.TABLE_WISE, T.ROW_WISE])
def test_a_module_quantised_for_inference(kind: ShardingType) -> None:
    """Its kernels have other names, and TorchRec's planner takes its rows for bytes."""
    sharders = [QuantEmbeddingBagCollectionSharder()]
    module = holding(quantised())
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=2, compute_device="cuda"),
        constraints={n: ParameterConstraints(sharding_types=[kind.value]) for n in "ab"},
        debug=False,
    )
    ours = from_torchrec(planner.plan(module, sharders), module, world_size=2)
    assert {t.compute_kernel for t in ours.tables.values()} == {ComputeKernel.FUSED}
    assert {s.size[1] for t in ours.tables.values() for s in t.shards} == {64}
    theirs = to_torchrec(ours, module)
    assert {t.compute_kernel for t in theirs.plan["x"].values()} == {"quant"}
    assert from_torchrec(theirs, module, world_size=2).tables == ours.tables
    dense = {key: replace(t, compute_kernel=ComputeKernel.DENSE) for key, t in ours.tables.items()}
    with pytest.raises(PlanError, match="use fused, fused_uvm, fused_uvm_caching"):
        to_torchrec(replace(ours, tables=dense), module)


def test_columns_of_a_quantised_table_are_bytes_in_torchrecs_plans() -> None:
    module = holding(quantised())
    columns = ParameterConstraints(sharding_types=["column_wise"], min_partition=32)
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=2, compute_device="cuda"),
        constraints=dict.fromkeys("ab", columns),
        debug=False,
    )
    plan = planner.plan(module, [QuantEmbeddingBagCollectionSharder()])
    with pytest.raises(PlanError, match="allow table_wise and row_wise"):
        from_torchrec(plan, module, world_size=2)


@pytest.mark.parametrize(("hardware", "device"), [("h100-sxm", "cuda"), ("cpu-gloo", "cpu")])
def test_a_plan_is_for_the_device_it_was_planned_for(
    tmp_path: Path, hardware: str, device: str
) -> None:
    """Whatever device is here."""
    write_model(tmp_path / "model.yaml", a_workload())
    setting = resolve(tmp_path / "model.yaml", Machine(gpus=WORLD, hardware=hardware))
    plan = replace(ONE_OF_EACH, meta=setting.head(0))
    theirs = to_torchrec(plan, bags(*ONE_OF_EACH.tables)).plan[""]
    specs = [table.sharding_spec for table in theirs.values() if table.sharding_spec]
    assert {s.placement.device().type for spec in specs for s in spec.shards} == {device}


def test_without_torchrec_the_message_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "torchrec", None)
    words = r"pip install torchrec==.* --no-deps"
    with pytest.raises(ImportError, match=words) as caught, needs_torchrec():
        import torchrec  # noqa: F401
    assert isinstance(caught.value, ShardoptError)


def plan_with(**parameters: Any) -> ShardingPlan:
    """The table on rank 0, with the given fields."""
    table = replace(sharded(T.TABLE_WISE, [(0, *WHOLE)]), parameters=parameters)
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
    """The check holds for the installed version, whichever it is."""
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
    model = bags("t0")
    theirs = to_torchrec(plan_with(), model)
    for name, value in given.items():
        setattr(theirs.plan[""]["t0"], name, value)
    ours = from_torchrec(theirs, model)
    stored = plan_from_dict(json.loads(json.dumps(plan_to_dict(ours))), where="p")
    assert stored.tables == ours.tables
    assert to_torchrec(stored, model).plan == theirs.plan


def test_cache_statistics_there_and_back() -> None:
    stats = EmbeddingOffloadStats(0.5, 100, torch.tensor([3, 2, 1]), ROWS)
    model = bags("t0")
    theirs = to_torchrec(plan_with(), model)
    theirs.plan[""]["t0"].cache_params = CacheParams(load_factor=0.3, stats=stats)
    ours = from_torchrec(theirs, model)
    assert ours.tables["t0"].cache_load_factor == 0.3
    back = to_torchrec(plan_from_dict(plan_to_dict(ours), where="p"), model)
    found = back.plan[""]["t0"].cache_params.stats
    assert found.hist.tolist() == [3, 2, 1]
    assert (found.cacheability, found.expected_lookups, found.height) == (0.5, 100, ROWS)
    assert found.expected_miss_rate(0.5) == stats.expected_miss_rate(0.5)


class Named(NamedTuple):
    """Stand-in for FBGEMM's EnrichmentPolicy, which some versions lack."""

    provider: str


def test_named_tuples_are_not_lists() -> None:
    model = bags("t0")
    theirs = to_torchrec(plan_with(), model)
    config: Any = KVZCHTBEConfig(enrichment_policy=Named("x"))  # type: ignore[arg-type]
    theirs.plan[""]["t0"].key_value_params = KeyValueParams(kvzch_tbe_config=config)
    with pytest.raises(PlanError, match=r"kvzch_tbe_config.enrichment_policy: a Named cannot be"):
        from_torchrec(theirs, model)


@dataclass
class Sharding(ParameterSharding):
    """Stand-in for a sharding of dynamicemb, which brings lookups of its own."""

    capacity: int = 3


@pytest.mark.parametrize("kernel", ["fused", "customized_kernel"])
def test_subclasses_are_refused_not_flattened(kernel: str) -> None:
    model = bags("t0")
    theirs = to_torchrec(plan_with(), model)
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
        to_torchrec(plan_with(**parameters), bags("t0"))
    assert "table 't0'" in str(caught.value)


def test_what_is_no_plan_of_torchrec_is_told() -> None:
    from shardopt import from_torchrec

    for given in ("param | sharding type | compute kernel", {"ebc": {}}, None):
        with pytest.raises(PlanError, match="takes the ShardingPlan that TorchRec"):
            from_torchrec(given, nn.Module())
