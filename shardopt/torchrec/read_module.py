"""From a user's module to the workload that the search takes.

What TorchRec's planner never looks at is read here: features from the configs, the optimizer
wherever it was given, the dense layers. What no module holds is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from predictor.errors import InputError
from predictor.plan import ComputeKernel, ShardingType
from predictor.workload import (
    Constraints,
    DenseArch,
    Feature,
    Optimizer,
    QComm,
    Table,
    Workload,
)
from shardopt.torchrec.homes import Home, homes
from shardopt.torchrec.install import needs_torchrec
from shardopt.torchrec.optimizers import SPARSE_OPTIMIZERS
from shardopt.torchrec.options import by_table

with needs_torchrec():
    import torch
    from torch import nn
    from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption
    from torchrec.distributed.types import ModuleSharder

DATA_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
FUSED = (ComputeKernel.FUSED, ComputeKernel.FUSED_UVM, ComputeKernel.FUSED_UVM_CACHING)
ADVICE = (
    "give the mean ids per sample of each feature: "
    "constraints={{'{table}': ParameterConstraints(pooling_factors=[...])}}, or model='model.yaml'"
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


def read_workload(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    options: Sequence[ShardingOption],
    facts: Facts,
) -> Workload:
    """The workload of what a planner is asked to place.

    Args:
        options: TorchRec's search space; each table has the types and kernels that it lists.

    Raises:
        InputError: a fact is missing or contradicts the module, or shardopt does not plan what the
            module holds; says which table and what to do.
    """
    offered = by_table(options)
    by_type = {sharder.module_type: sharder for sharder in sharders}
    tables = tuple(
        _table(found, by_type[type(found[0].module[1])], facts) for found in offered.values()
    )
    known = facts.known
    return Workload(
        name=type(module).__name__ if known is None else known.name,
        batch_size=facts.batch_size,
        tables=tables,
        dense=_dense(module, {path for path, _ in offered}) if known is None else known.dense,
        train_pipeline="base" if known is None else known.train_pipeline,
        qcomm=_qcomm(by_type.values()),
    )


def _table(options: Sequence[ShardingOption], sharder: Any, facts: Facts) -> Table:
    option = options[0]
    where = f"table '{option.name}' of module '{option.path}'"
    if option.dependency is not None:
        raise InputError(
            f"{where} is part of an embedding tower, whose tables must share a host; shardopt does "
            "not plan towers: use TorchRec's EmbeddingShardingPlanner for this module"
        )
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
        weighted=bool(option.is_weighted or option.has_feature_processor),
        optimizer=_optimizer(option, sharder, where),
        constraints=_constraints(options, facts, where),
    )


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
    factors = _one_each(told and told.pooling_factors, home, "pooling_factors", where, known)
    poolings = _one_each(told and told.num_poolings, home, "num_poolings", where, known)
    found = []
    for name in home.features:
        feature = known.get(name)
        if name in factors:
            feature = replace(feature or Feature(name, 1.0), pooling_factor=factors[name])
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
        found.append(replace(feature, num_poolings=poolings.get(name, feature.num_poolings)))
    return tuple(found)


def _one_each(
    values: Sequence[float] | None, home: Home, what: str, where: str, known: Mapping[str, Any]
) -> dict[str, float]:
    """Feature name -> value of a list in a constraint; TorchRec pads it silently."""
    if values is None or (len(values) == 1 and len(home.features) != 1 and known):
        return {}
    if len(values) != len(home.features):
        raise InputError(
            f"{where} has {len(home.features)} features ({', '.join(home.features)}), but its "
            f"constraint has {len(values)} {what}; give one a feature"
        )
    return dict(zip(home.features, map(float, values), strict=True))


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
    )


def _optimizer(option: ShardingOption, sharder: Any, where: str) -> str:
    """From the backward (`apply_optimizer_in_backward`), else from the sharder's fused_params.

    FBGEMM's own default is plain SGD.
    """
    classes = getattr(option.tensor, "_optimizer_classes", None) or []
    for kind in classes:
        for name, known in SPARSE_OPTIMIZERS.items():
            if known is kind or known.__name__ == kind.__name__:
                return name
        raise InputError(
            f"{where} is stepped by {kind.__name__}, which shardopt does not know; it knows "
            f"{', '.join(sorted({k.__name__ for k in SPARSE_OPTIMIZERS.values()}))}"
        )
    fused = (getattr(sharder, "fused_params", None) or {}).get("optimizer", Optimizer.EXACT_SGD)
    value = str(getattr(fused, "value", fused))
    if value not in list(Optimizer):
        raise InputError(
            f"{where}: fused_params of its sharder name the optimizer {value}, which shardopt does "
            f"not know; it knows {', '.join(Optimizer)}"
        )
    return value


def _dense(module: nn.Module, sharded: Iterable[str]) -> DenseArch:
    """The linear layers outside of what is sharded; all run behind the lookups."""
    outside = tuple(f"{path}." for path in sharded)
    layers, dtype = [], torch.float32
    for name, child in module.named_modules():
        if isinstance(child, nn.Linear) and not (f"{name}.").startswith(outside):
            layers.append((child.in_features, child.out_features))
            dtype = child.weight.dtype
    return DenseArch(
        in_features=layers[0][0] if layers else 1,
        bottom_mlp=(),
        top_mlp=(),
        interaction="concat",
        data_type=DATA_TYPES.get(dtype, "fp32"),
        linears=tuple(layers),
    )


def _qcomm(sharders: Iterable[Any]) -> QComm:
    """Precision on the wire, from the codecs of the first sharder that has some."""
    for sharder in sharders:
        for codecs in (getattr(sharder, "qcomm_codecs_registry", None) or {}).values():
            return QComm(_precision(codecs.forward), _precision(codecs.backward))
    return QComm()


def _precision(codec: Any) -> str:
    return DATA_TYPES.get(getattr(codec, "quantized_dtype", None), "fp32")
