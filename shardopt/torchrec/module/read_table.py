"""From what TorchRec offers for a table, and the module it lies in, to our table.

Features come from the module's config, the optimizer from wherever it was given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from predictor.errors import InputError
from predictor.model.plan import ComputeKernel, ShardingType
from predictor.model.workload import Constraints, Feature, Optimizer, Table, Workload
from shardopt.extras import needs_torchrec
from shardopt.torchrec.module.homes import Home, homes
from shardopt.torchrec.training.optimizers import SPARSE_OPTIMIZERS

with needs_torchrec():
    import torch
    from torchrec.distributed.planner.constants import POOLING_FACTOR
    from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption

DATA_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
FUSED = (ComputeKernel.FUSED, ComputeKernel.FUSED_UVM, ComputeKernel.FUSED_UVM_CACHING)
ADVICE = (
    "give the mean ids per sample of each feature: "
    "constraints={{'{table}': ParameterConstraints(pooling_factors=[...])}}, with [1.0] where a "
    "sample has one id, or model='model.yaml'"
)


class Facts(NamedTuple):
    """What no module holds.

    Args:
        batch_size: samples per rank.
        constraints: TorchRec's, by table name.
        known: a workload, read from a model file, with pooling factors and index distributions by
            feature, train pipeline and dense part; None where there is none.
    """

    batch_size: int
    constraints: Mapping[str, ParameterConstraints]
    known: Workload | None


def read_table(
    options: Sequence[ShardingOption], fused_params: Mapping[str, Any], facts: Facts
) -> Table:
    """The table that all ``options`` are for.

    Args:
        options: what TorchRec offers for it; it may have the types and kernels that they name.
        fused_params: those of its sharder.

    Raises:
        InputError: a fact is missing or contradicts the module, or shardopt does not know what the
            module holds; says which table and what to do.
    """
    option = options[0]
    where = f"table '{option.name}' of module '{option.path}'"
    home = _home(option, where)
    dtype = DATA_TYPES.get(option.tensor.dtype)
    if dtype is None:
        raise InputError(
            f"{where} has weights of {option.tensor.dtype}; shardopt plans tables of "
            f"{', '.join(map(str, DATA_TYPES))}"
        )
    return Table(
        name=option.name,
        num_embeddings=home.shape[0],
        embedding_dim=home.shape[1],
        features=_features(home, facts, where),
        module=option.path or "ebc",
        data_type=dtype,
        pooling=home.pooling,
        weighted=_weighted(option, facts),
        optimizer=_optimizer(option, fused_params, where),
        constraints=_constraints(options, facts, where),
    )


def _weighted(option: ShardingOption, facts: Facts) -> bool:
    """As `ShardPerfContext.build_shard_perf_contexts` has it (planner/estimator/types.py): the
    module's word goes before the constraint's, and feature processors weigh."""
    told = facts.constraints.get(option.name)
    weighted = option.is_weighted
    if weighted is None:
        weighted = told is not None and told.is_weighted
    return bool(weighted or option.has_feature_processor)


def _home(option: ShardingOption, where: str) -> Home:
    """Found anywhere below the module that is sharded as a whole."""
    for home in homes(option.module[1]):
        if home.table == option.name:
            return home
    raise InputError(
        f"{where}: no EmbeddingBagCollection or EmbeddingCollection below "
        f"{type(option.module[1]).__name__} has a config for it; shardopt plans tables of those"
    )


def _features(home: Home, facts: Facts, where: str) -> tuple[Feature, ...]:
    told = facts.constraints.get(home.table)
    known = {
        feature.name: feature
        for table in (facts.known.tables if facts.known else ())
        if table.name == home.table
        for feature in table.features
    }
    names = _feature_order(told, home, where)
    lists = {
        what: _one_each(told and getattr(told, what), names, what, where)
        for what in ("pooling_factors", "num_poolings", "batch_sizes")
    }
    found = []
    for name in home.features:
        feature = known.get(name)
        if name in lists["pooling_factors"]:
            factor = lists["pooling_factors"][name]
            feature = replace(feature or Feature(name, 1.0), pooling_factor=factor)
        if feature is None:
            raise InputError(
                f"{where}: feature '{name}' has no pooling factor; "
                + ADVICE.format(table=home.table)
            )
        if not feature.pooling_factor > 0:
            raise InputError(
                f"{where}: feature '{name}' has pooling factor {feature.pooling_factor}; "
                "give the mean ids per sample, above 0"
            )
        poolings = lists["num_poolings"].get(name, feature.num_poolings)
        # a feature with a batch of its own is pooled that many times more, or less, a sample
        poolings *= lists["batch_sizes"].get(name, facts.batch_size) / facts.batch_size
        found.append(replace(feature, num_poolings=poolings))
    return tuple(found)


def _feature_order(told: ParameterConstraints | None, home: Home, where: str) -> Sequence[str]:
    """The features in the order in which the lists of the constraint name them."""
    given = (told and told.feature_names) or home.features
    if sorted(given) != sorted(home.features):
        raise InputError(
            f"{where} has the features {', '.join(home.features)}, but its constraint has "
            f"feature_names {', '.join(given)}; give those of the module, in the order of "
            "pooling_factors, or leave feature_names out"
        )
    return given


def _one_each(
    values: Sequence[float] | None, names: Sequence[str], what: str, where: str
) -> dict[str, float]:
    """Feature name -> value of a list in a constraint; TorchRec pads it silently."""
    if values is None or _left_out(values):
        return {}
    if len(values) != len(names):
        raise InputError(
            f"{where} has {len(names)} features ({', '.join(names)}), but its "
            f"constraint has {len(values)} {what}; give one a feature"
        )
    return dict(zip(names, map(float, values), strict=True))


def _left_out(values: Sequence[float]) -> bool:
    """Whether a list is what `ParameterConstraints` fills in for pooling factors that it was not
    given: its own constant, that very object, which nobody's 1.0 is."""
    return len(values) == 1 and values[0] is POOLING_FACTOR


def _constraints(options: Sequence[ShardingOption], facts: Facts, where: str) -> Constraints:
    """What the user demands, and what the enumerator left of it."""
    told = facts.constraints.get(options[0].name)
    types = {ShardingType(o.sharding_type) for o in options}
    offered = {o.compute_kernel for o in options}
    planned = tuple(kernel.value for kernel in ComputeKernel if kernel in offered)
    if not planned:
        raise InputError(
            f"{where} can only have the compute kernels {', '.join(sorted(offered))}; shardopt "
            f"plans {', '.join(ComputeKernel)}: use TorchRec's EmbeddingShardingPlanner for it"
        )
    # a list that names the dense kernel asks for it beyond data-parallel, too
    asked = told is not None and told.compute_kernels
    fused = FUSED if ComputeKernel.FUSED_UVM in offered else (ComputeKernel.FUSED,)
    kernels = planned if asked or not offered.issuperset(fused) else None
    load_factor = (
        None if told is None or told.cache_params is None else told.cache_params.load_factor
    )
    return Constraints(
        sharding_types=tuple(t for t in ShardingType if t in types),
        compute_kernels=kernels,
        min_partition=None if told is None else told.min_partition,
        cache_load_factor=load_factor,
        enforce_hbm=None if told is None else told.enforce_hbm,
        device_group=None if told is None else told.device_group,
    )


def _optimizer(option: ShardingOption, fused_params: Mapping[str, Any], where: str) -> str:
    """From the backward (`apply_optimizer_in_backward`), from a module that has one fused into it
    (`FusedEmbeddingBagCollection`), else from the sharder's fused_params.

    FBGEMM's own default is plain SGD.
    """
    kinds = list(getattr(option.tensor, "_optimizer_classes", None) or ())
    if hasattr(option.module[1], "optimizer_type"):
        kinds.append(option.module[1].optimizer_type())
    for kind in kinds:
        for name, known in SPARSE_OPTIMIZERS.items():
            if known is kind or known.__name__ == kind.__name__:
                return name
        raise InputError(
            f"{where} is stepped by {kind.__name__}, which shardopt does not know; it knows "
            f"{', '.join(sorted({k.__name__ for k in SPARSE_OPTIMIZERS.values()}))}"
        )
    fused = fused_params.get("optimizer", Optimizer.EXACT_SGD)
    value = str(getattr(fused, "value", fused))
    if value not in list(Optimizer):
        raise InputError(
            f"{where}: fused_params of its sharder name the optimizer {value}, which shardopt does "
            f"not know; it knows {', '.join(Optimizer)}"
        )
    return value
