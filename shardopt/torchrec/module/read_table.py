"""One table of a user's module as the search takes it.

Features come from the module's config, the optimizer from the backward or the sharder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from predictor.errors import InputError
from predictor.model.plan import ComputeKernel, ShardingType
from predictor.model.workload import Constraints, Feature, Optimizer, Table, Workload
from shardopt.extras import needs_torchrec
from shardopt.torchrec.logs import logger
from shardopt.torchrec.plan.module_tables import ModuleTable, find_tables
from shardopt.torchrec.training.optimizers import SPARSE_OPTIMIZERS

with needs_torchrec():
    import torch
    from torchrec.distributed.planner.constants import POOLING_FACTOR
    from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption

DATA_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class UserInputs(NamedTuple):
    """What the user gives, as no module holds it.

    Args:
        batch_size: samples per rank.
        constraints: TorchRec's, by table name.
        known: a workload, read from a model file, with pooling factors and index distributions by
            feature, train pipeline and dense part; None where there is none.
        default_pooling_factor: of features for which nothing is given; None for TorchRec's 1,
            which is said.
        strict: features for which nothing is given are an error.
        example_inputs: what the module's forward takes; None to make it from the features.
        device: type of the topology's devices.
    """

    batch_size: int
    constraints: Mapping[str, ParameterConstraints]
    known: Workload | None
    default_pooling_factor: float | None = None
    strict: bool = False
    example_inputs: Any = None
    device: str = "cuda"

    def constraint(self, table: str) -> ParameterConstraints:
        """That of a table; one that asks for nothing if there is none."""
        return self.constraints.get(table) or ParameterConstraints()

    def known_features(self, table: str) -> dict[str, Feature]:
        """Features of a table in the model file, by name."""
        tables = self.known.tables if self.known else ()
        return {f.name: f for t in tables if t.name == table for f in t.features}


def check_pooling_factor(default: float | None) -> None:
    """Refuse a default that is no mean number of ids.

    Raises:
        InputError: it is not above 0.
    """
    if default is not None and not 0 < default < math.inf:
        raise InputError(
            f"default_pooling_factor is {default}; give the mean ids per sample, above 0"
        )


def why_not_predicted(
    options: Sequence[ShardingOption], fused_params: Mapping[str, Any]
) -> str | None:
    """What of a table TorchRec plans and shardopt has no model for; None if it has one.

    Args:
        options: what TorchRec offers for the table.
        fused_params: those of its sharder.
    """
    option = options[0]
    kernels = {o.compute_kernel for o in options}
    if option.dependency is not None:
        return "it is part of an embedding tower, whose tables must share a host"
    if kernels.isdisjoint(ComputeKernel):
        return f"it can only have the compute kernels {', '.join(sorted(kernels))}"
    if option.tensor.dtype not in DATA_TYPES:
        return f"its weights are {option.tensor.dtype}"
    if _find_table(option) is None:
        return (
            "no EmbeddingBagCollection or EmbeddingCollection below "
            f"{type(option.module[1]).__name__} has a config for it"
        )
    kind = _optimizer(option, fused_params)
    return None if kind in list(Optimizer) else f"it is stepped by {kind}"


def features_without_factors(
    options: Sequence[ShardingOption], inputs: UserInputs
) -> tuple[str, ...]:
    """Features of a table for which nobody gives a pooling factor."""
    table = _find_table(options[0])
    if table is None or _given_factors(options[0], inputs) is not None:
        return ()
    known = inputs.known_features(table.table)
    return tuple(name for name in table.features if name not in known)


def read_table(
    options: Sequence[ShardingOption], fused_params: Mapping[str, Any], inputs: UserInputs
) -> Table:
    """The table that all ``options`` are for.

    Args:
        options: what TorchRec offers for it; it may have the types and kernels that they name.
        fused_params: those of its sharder.

    Raises:
        InputError: a fact contradicts the module, or shardopt does not predict such a table
            (`why_not_predicted`); says which.
    """
    option = options[0]
    where = f"table '{option.name}' of module '{option.path}'"
    problem = why_not_predicted(options, fused_params)
    module_table = _find_table(option)
    if problem or module_table is None:
        raise InputError(f"{where}: {problem}, which shardopt does not predict")
    return Table(
        name=option.name,
        num_embeddings=module_table.shape[0],
        embedding_dim=module_table.shape[1],
        features=_features(module_table, option, inputs, where),
        module=option.path or "ebc",
        data_type=_data_type(module_table, option),
        pooling=module_table.pooling,
        weighted=_weighted(option, inputs),
        optimizer=_optimizer(option, fused_params),
        constraints=_constraints(options, fused_params, inputs),
    )


def _data_type(module_table: ModuleTable, option: ShardingOption) -> str:
    """As in `create_sharding_infos_by_sharding`: the config's, where shardopt knows that."""
    known = module_table.data_type
    return known if known in DATA_TYPES.values() else DATA_TYPES[option.tensor.dtype]


def _weighted(option: ShardingOption, inputs: UserInputs) -> bool:
    """As in `ShardPerfContext.build_shard_perf_contexts` (planner/estimator/types.py): the module
    overrides the constraint, and feature processors weight the lookup. TorchRec's enumerator does
    not see those of a FeatureProcessedEmbeddingBagCollection."""
    weighted = hasattr(option.module[1], "_feature_processors") or option.is_weighted
    if weighted is None:
        weighted = inputs.constraint(option.name).is_weighted
    return bool(weighted or option.has_feature_processor)


def _find_table(option: ShardingOption) -> ModuleTable | None:
    """Found anywhere below the module that is sharded as a whole."""
    tables = find_tables(option.module[1])
    return next((table for table in tables if table.table == option.name), None)


def _features(
    module_table: ModuleTable, option: ShardingOption, inputs: UserInputs, where: str
) -> tuple[Feature, ...]:
    """With the pooling factors that TorchRec rates by, else the model file's, else the default."""
    known = inputs.known_features(module_table.table)
    names = _feature_order(inputs.constraint(option.name), module_table)
    default = inputs.default_pooling_factor or POOLING_FACTOR
    found = {
        name: replace(
            known.get(name) or Feature(name, default),
            position_weights=module_table.position_weights.get(name, 0),
        )
        for name in module_table.features
    }
    given = _given_factors(option, inputs)
    count = len(names if given is None else given)
    ones = (1.0,) * count
    poolings = _list(option.num_poolings or inputs.constraint(option.name).num_poolings, count)
    batches = [
        size / inputs.batch_size
        for size in _list(inputs.constraint(option.name).batch_sizes, count)
        or (inputs.batch_size,) * count
    ]
    if given is not None and len(given) != len(names):
        # what TorchRec counts: it never looks at how many features the table has
        # (docs/decisions/0048)
        weights = zip(given, poolings or ones, batches, strict=True)
        share = sum(math.prod(of_feature) for of_feature in weights) / len(names)
        logger.warning(
            "%s has %d features (%s), but its constraint has %d pooling_factors; as in TorchRec "
            "they count for the table as a whole: %g ids per sample a feature; give one a feature",
            where,
            len(names),
            ", ".join(names),
            len(given),
            share,
        )
        return tuple(replace(f, pooling_factor=share, num_poolings=1.0) for f in found.values())
    for index, name in enumerate(names):
        feature = found[name]
        factor = feature.pooling_factor if given is None else float(given[index])
        if not factor > 0:
            raise InputError(
                f"{where}: feature '{name}' has pooling factor {factor}; "
                "give the mean ids per sample, above 0"
            )
        # a feature with another batch size is pooled more, or less, often per sample
        pooled = (poolings[index] if poolings else feature.num_poolings) * batches[index]
        found[name] = replace(feature, pooling_factor=factor, num_poolings=pooled)
    return tuple(found.values())


def _list(values: Sequence[float] | None, count: int) -> Sequence[float] | None:
    """One number a feature; TorchRec asserts that a list of another length is not there."""
    return values if values and len(values) == count else None


def _given_factors(option: ShardingOption, inputs: UserInputs) -> Sequence[float] | None:
    """The pooling factors that the enumerator was given, else the planner; None if neither was."""
    for values in (option.input_lengths, inputs.constraint(option.name).pooling_factors):
        if values and not _is_default(values):
            return values
    return None


def _is_default(values: Sequence[float]) -> bool:
    """Whether `ParameterConstraints` filled in the list because no pooling factors were given: it
    uses its own constant object then, which a user's 1.0 is not."""
    return len(values) == 1 and values[0] is POOLING_FACTOR


def _feature_order(constraint: ParameterConstraints, module_table: ModuleTable) -> Sequence[str]:
    """The features in the order in which the lists of the constraint name them; TorchRec does not
    look whether its names are those of the module."""
    names = constraint.feature_names or ()
    return names if sorted(names) == sorted(module_table.features) else module_table.features


def _constraints(
    options: Sequence[ShardingOption], fused_params: Mapping[str, Any], inputs: UserInputs
) -> Constraints:
    """What the user asks for, as far as the enumerator offers it.

    A load factor that no constraint sets is the sharder's, as for `EmbeddingStorageEstimator`
    (planner/shard_estimators.py) and FBGEMM.
    """
    constraint = inputs.constraint(options[0].name)
    pairs = {(o.sharding_type, o.compute_kernel) for o in options}
    factor = options[0].cache_load_factor
    return Constraints(
        sharding_types=tuple(map(ShardingType, constraint.sharding_types or ())) or None,
        compute_kernels=tuple(constraint.compute_kernels or ()) or None,
        min_partition=constraint.min_partition,
        cache_load_factor=fused_params.get("cache_load_factor") if factor is None else factor,
        enforce_hbm=options[0].enforce_hbm,
        device_group=constraint.device_group,
        offered=tuple((t, k) for t in ShardingType for k in ComputeKernel if (t, k) in pairs),
    )


def _optimizer(option: ShardingOption, fused_params: Mapping[str, Any]) -> str:
    """From the backward (`apply_optimizer_in_backward`), from a module that has one fused into it
    (`FusedEmbeddingBagCollection`), else from the sharder's fused_params; its class where it is
    none of `Optimizer`.

    FBGEMM's own default is plain SGD.
    """
    for kind in _optimizer_classes(option):
        names = (n for n, k in SPARSE_OPTIMIZERS.items() if k.__name__ == kind.__name__)
        return str(next(names, kind.__name__))
    fused = fused_params.get("optimizer", Optimizer.EXACT_SGD)
    return str(getattr(fused, "value", fused))


def _optimizer_classes(option: ShardingOption) -> list[Any]:
    kinds = list(getattr(option.tensor, "_optimizer_classes", None) or ())
    if hasattr(option.module[1], "optimizer_type"):
        kinds.append(option.module[1].optimizer_type())
    return kinds


def names_optimizer(option: ShardingOption, fused_params: Mapping[str, Any]) -> bool:
    """Whether the optimizer of a table is set anywhere, and not FBGEMM's default."""
    return bool(_optimizer_classes(option)) or "optimizer" in fused_params
