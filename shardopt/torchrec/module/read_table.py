"""One table of a user's module as the search takes it.

Features come from the module's config, the optimizer from the backward or the sharder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from predictor.errors import InputError
from predictor.model.plan import ComputeKernel, ShardingType
from predictor.model.workload import Constraints, Feature, Optimizer, Table, Workload
from shardopt.extras import needs_torchrec
from shardopt.torchrec.plan.module_tables import ModuleTable, find_tables
from shardopt.torchrec.training.optimizers import SPARSE_OPTIMIZERS

with needs_torchrec():
    import torch
    from torchrec.distributed.planner.constants import POOLING_FACTOR
    from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption

DATA_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
ADVICE = (
    "give the mean ids per sample of each feature: "
    "constraints={{'{table}': ParameterConstraints(pooling_factors=[...])}}, with [1.0] where a "
    "sample has one id, or model='model.yaml'"
)


class UserInputs(NamedTuple):
    """What the user gives, as no module holds it.

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
    options: Sequence[ShardingOption], fused_params: Mapping[str, Any], inputs: UserInputs
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
    module_table = _find_table(option, where)
    dtype = DATA_TYPES.get(option.tensor.dtype)
    if dtype is None:
        raise InputError(
            f"{where} has weights of {option.tensor.dtype}; shardopt plans tables of "
            f"{', '.join(map(str, DATA_TYPES))}"
        )
    return Table(
        name=option.name,
        num_embeddings=module_table.shape[0],
        embedding_dim=module_table.shape[1],
        features=_features(module_table, inputs, where),
        module=option.path or "ebc",
        data_type=dtype,
        pooling=module_table.pooling,
        weighted=_weighted(option, inputs),
        optimizer=_optimizer(option, fused_params, where),
        constraints=_constraints(options, inputs, where),
    )


def _weighted(option: ShardingOption, inputs: UserInputs) -> bool:
    """As in `ShardPerfContext.build_shard_perf_contexts` (planner/estimator/types.py): the module
    overrides the constraint, and feature processors weight the lookup."""
    constraint = inputs.constraints.get(option.name)
    weighted = option.is_weighted
    if weighted is None:
        weighted = constraint is not None and constraint.is_weighted
    return bool(weighted or option.has_feature_processor)


def _find_table(option: ShardingOption, where: str) -> ModuleTable:
    """Found anywhere below the module that is sharded as a whole."""
    for module_table in find_tables(option.module[1]):
        if module_table.table == option.name:
            return module_table
    raise InputError(
        f"{where}: no EmbeddingBagCollection or EmbeddingCollection below "
        f"{type(option.module[1]).__name__} has a config for it; shardopt plans tables of those"
    )


def _features(module_table: ModuleTable, inputs: UserInputs, where: str) -> tuple[Feature, ...]:
    constraint = inputs.constraints.get(module_table.table)
    known = {
        feature.name: feature
        for table in (inputs.known.tables if inputs.known else ())
        if table.name == module_table.table
        for feature in table.features
    }
    names = _feature_order(constraint, module_table, where)
    lists = {
        what: _by_feature(constraint and getattr(constraint, what), names, what, where)
        for what in ("pooling_factors", "num_poolings", "batch_sizes")
    }
    found = []
    for name in module_table.features:
        feature = known.get(name)
        if name in lists["pooling_factors"]:
            factor = lists["pooling_factors"][name]
            feature = replace(feature or Feature(name, 1.0), pooling_factor=factor)
        if feature is None:
            raise InputError(
                f"{where}: feature '{name}' has no pooling factor; "
                + ADVICE.format(table=module_table.table)
            )
        if not feature.pooling_factor > 0:
            raise InputError(
                f"{where}: feature '{name}' has pooling factor {feature.pooling_factor}; "
                "give the mean ids per sample, above 0"
            )
        poolings = lists["num_poolings"].get(name, feature.num_poolings)
        # a feature with another batch size is pooled more, or less, often per sample
        poolings *= lists["batch_sizes"].get(name, inputs.batch_size) / inputs.batch_size
        found.append(replace(feature, num_poolings=poolings))
    return tuple(found)


def _feature_order(
    constraint: ParameterConstraints | None, module_table: ModuleTable, where: str
) -> Sequence[str]:
    """The features in the order in which the lists of the constraint name them."""
    names = (constraint and constraint.feature_names) or module_table.features
    if sorted(names) != sorted(module_table.features):
        raise InputError(
            f"{where} has the features {', '.join(module_table.features)}, but its constraint has "
            f"feature_names {', '.join(names)}; give those of the module, in the order of "
            "pooling_factors, or leave feature_names out"
        )
    return names


def _by_feature(
    values: Sequence[float] | None, names: Sequence[str], what: str, where: str
) -> dict[str, float]:
    """Feature name -> value of a list in a constraint; TorchRec pads it silently."""
    if values is None or _is_default(values):
        return {}
    if len(values) != len(names):
        raise InputError(
            f"{where} has {len(names)} features ({', '.join(names)}), but its "
            f"constraint has {len(values)} {what}; give one a feature"
        )
    return dict(zip(names, map(float, values), strict=True))


def _is_default(values: Sequence[float]) -> bool:
    """Whether `ParameterConstraints` filled in the list because no pooling factors were given: it
    uses its own constant object then, which a user's 1.0 is not."""
    return len(values) == 1 and values[0] is POOLING_FACTOR


def _constraints(options: Sequence[ShardingOption], inputs: UserInputs, where: str) -> Constraints:
    """What the user asks for, as far as the enumerator offers it."""
    constraint = inputs.constraints.get(options[0].name) or ParameterConstraints()
    planned = list(ComputeKernel)
    pairs = {(o.sharding_type, o.compute_kernel) for o in options if o.compute_kernel in planned}
    if not pairs:
        raise InputError(
            f"{where} can only have the compute kernels "
            f"{', '.join(sorted({o.compute_kernel for o in options}))}; shardopt plans "
            f"{', '.join(planned)}; use TorchRec's EmbeddingShardingPlanner for it"
        )
    cache = constraint.cache_params
    return Constraints(
        sharding_types=tuple(map(ShardingType, constraint.sharding_types or ())) or None,
        compute_kernels=tuple(constraint.compute_kernels or ()) or None,
        min_partition=constraint.min_partition,
        cache_load_factor=None if cache is None else cache.load_factor,
        enforce_hbm=constraint.enforce_hbm,
        device_group=constraint.device_group,
        offered=tuple((t, k) for t in ShardingType for k in planned if (t, k) in pairs),
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
