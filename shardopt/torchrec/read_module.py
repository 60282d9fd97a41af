"""From a user's module to the workload that the search takes.

Reads what TorchRec's planner does not: features from the configs, optimizers from the backward or
the sharder, the dense part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from predictor.errors import InputError, did_you_mean
from predictor.model.captured import CapturedDense
from predictor.model.plan import HASHED, ComputeKernel, ShardingType
from predictor.model.workload import (
    Constraints,
    DenseArch,
    Feature,
    MeasuredDense,
    Optimizer,
    QComm,
    Table,
    Workload,
)
from shardopt.config.model import hash_tables, variable_batches
from shardopt.extras import needs_torchrec
from shardopt.formatting import plural
from shardopt.torchrec.capture.capture import capture_dense, linears_outside
from shardopt.torchrec.logs import logger
from shardopt.torchrec.options import CUSTOMIZED, group_by_table, kernel_of
from shardopt.torchrec.pipelines import STASHED
from shardopt.torchrec.private import (
    deduplicates_ids,
    feature_processors,
    optimizers_in_backward,
    remaps_ids,
)
from shardopt.torchrec.tables import (
    SPARSE_OPTIMIZERS,
    ModuleTable,
    find_embedding_modules,
    find_tables,
    other_processors,
)

with needs_torchrec():
    import torch
    from torch import nn
    from torchrec.distributed.embedding import get_ec_index_dedup
    from torchrec.distributed.planner.constants import POOLING_FACTOR
    from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption
    from torchrec.distributed.types import CacheParams, ModuleSharder

PLACEHOLDER = [1, 1]
"""Size of the shards that NVIDIA's `DynamicEmbeddingEnumerator` gives a table of its own."""
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
        measured: features of a stats file, by name; their pooling factors hold.
        train_pipeline: that is predicted; None for the model file's, else ``base``.
    """

    batch_size: int
    constraints: Mapping[str, ParameterConstraints]
    known: Workload | None
    default_pooling_factor: float | None = None
    strict: bool = False
    example_inputs: Any = None
    device: str = "cuda"
    measured: Mapping[str, Feature] = MappingProxyType({})
    train_pipeline: str | None = None

    @property
    def pipeline(self) -> str:
        """That is predicted."""
        known = "base" if self.known is None else self.known.train_pipeline
        return self.train_pipeline or known

    def constraint(self, table: str) -> ParameterConstraints:
        """That of a table; one that asks for nothing if there is none."""
        return self.constraints.get(table) or ParameterConstraints()

    def known_features(self, table: str) -> dict[str, Feature]:
        """Features of a table in the model file, and those of a stats file, by name."""
        tables = self.known.tables if self.known else ()
        lengths = {
            name: replace(Feature(name, f.pooling_factor), pooling_factor_std=f.pooling_factor_std)
            for name, f in self.measured.items()
        }
        return lengths | {f.name: f for t in tables if t.name == table for f in t.features}


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
    kernels = {kernel_of(o) for o in options}
    if option.dependency is not None:
        return "it is part of an embedding tower, whose tables must share a host"
    if all(list(shard.size) == PLACEHOLDER for shard in option.shards) and _has_more(option):
        return "dynamicemb's own planner places it"
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


def _has_more(option: ShardingOption) -> bool:
    return int(option.tensor.numel()) > len(option.shards)


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
        storage="dynamicemb" if kernel_of(option) in HASHED else "torchrec",
    )


def _data_type(module_table: ModuleTable, option: ShardingOption) -> str:
    """As in `create_sharding_infos_by_sharding`: the config's, where shardopt knows that."""
    known = module_table.data_type
    return known if known in DATA_TYPES.values() else DATA_TYPES[option.tensor.dtype]


def _weighted(option: ShardingOption, inputs: UserInputs) -> bool:
    """As in `ShardPerfContext.build_shard_perf_contexts` (planner/estimator/types.py): the module
    overrides the constraint, and feature processors weight the lookup. TorchRec's enumerator does
    not see those of a FeatureProcessedEmbeddingBagCollection."""
    weighted = feature_processors(option.module[1]) is not None or option.is_weighted
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
        # (docs/decisions/0034-hook.md)
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
    pairs = {(o.sharding_type, kernel_of(o)) for o in options}
    # an enumerator may offer several, as TorchEasyRec's does for hash tables
    factors = {o.cache_load_factor for o in options if o.compute_kernel == CUSTOMIZED}
    factor = options[0].cache_load_factor if len(factors) < 2 else None
    return Constraints(
        sharding_types=tuple(map(ShardingType, constraint.sharding_types or ())) or None,
        compute_kernels=tuple(k for k in constraint.compute_kernels or () if k != CUSTOMIZED)
        or None,
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
    kinds = optimizers_in_backward(option.tensor)
    if hasattr(option.module[1], "optimizer_type"):
        kinds.append(option.module[1].optimizer_type())
    return kinds


def names_optimizer(option: ShardingOption, fused_params: Mapping[str, Any]) -> bool:
    """Whether the optimizer of a table is set anywhere, and not FBGEMM's default."""
    return bool(_optimizer_classes(option)) or "optimizer" in fused_params


Dense = DenseArch | CapturedDense | MeasuredDense


def read_workload(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    options: Sequence[ShardingOption],
    inputs: UserInputs,
    dense_of: Callable[[Sequence[Table]], Dense] | None = None,
) -> Workload:
    """The workload of the tables that a planner places.

    Args:
        options: TorchRec's search space; each table has the types and kernels that it lists.
        dense_of: gives the dense part that goes with the tables, where no model file does; None
            to capture it for this batch, or to count linear layers where that fails.

    Raises:
        InputError: a fact is missing or contradicts the module, or shardopt does not plan what the
            module holds; says which table and what to do.
    """
    offered = group_by_table(options)
    by_type = {sharder.module_type: sharder for sharder in sharders}
    tell_missing_factors(offered.values(), inputs)
    tables = []
    for found in offered.values():
        sharder = by_type[type(found[0].module[1])]
        table = read_table(found, fused_params_of(sharder), inputs)
        dedup = not table.is_pooled and deduplicates(sharder)
        tables.append(replace(table, index_dedup=dedup))
    for what in not_priced(module, tables):
        logger.warning("%s", what)
    _warn_unknown_tables(inputs, {o.name for o in options} | {t.table for t in find_tables(module)})
    known = inputs.known
    if known is not None:
        dense: Dense = known.dense
    elif dense_of is not None:
        dense = dense_of(tables)
    else:
        dense = _captured_or_linears(module, tables, inputs)
    return Workload(
        name=type(module).__name__ if known is None else known.name,
        batch_size=inputs.batch_size,
        tables=tuple(tables),
        dense=dense,
        train_pipeline=inputs.pipeline,
        qcomm=_qcomm(by_type.values()),
    )


def not_priced(module: nn.Module, tables: Sequence[Table]) -> list[str]:
    """What embedding modules do beside what is priced, in a sentence each."""
    found = []
    stashed = [f"'{table.table}'" for table in find_tables(module) if table.stashed]
    if stashed:
        found.append(f"the weights of {', '.join(stashed)} are stashed: {STASHED}")
    for path, whole, _ in find_embedding_modules(module):
        if remaps_ids(whole):
            found.append(
                f"the managed collision of '{path}' is not priced, its lookups are: the remap of "
                "ids, its buffers and its exchange of ids come on top of the predicted time"
            )
        found += [
            f"the feature processor {kind} of '{path}' is not priced, its weighted lookups are: of "
            "TorchRec's PositionWeightedModule alone it is known what it runs"
            for kind in other_processors(whole)
        ]
    return found + variable_batches(tables) + hash_tables(tables)


def deduplicates(sharder: Any) -> bool:
    """Whether the modules of a sharder send the distinct ids of their batch only."""
    return deduplicates_ids(sharder) or bool(get_ec_index_dedup())


def fused_params_of(sharder: Any) -> Mapping[str, Any]:
    """What a sharder passes on to FBGEMM."""
    return getattr(sharder, "fused_params", None) or {}


def tell_missing_factors(offered: Collection[Sequence[ShardingOption]], inputs: UserInputs) -> None:
    """Say once for which features nobody gives a pooling factor, if no default is given.

    Raises:
        InputError: the same, if the inputs are strict.
    """
    if inputs.default_pooling_factor is not None:
        return
    missing = [(o[0].name, f) for o in offered for f in features_without_factors(o, inputs)]
    if not missing:
        return
    features = ", ".join(f"{feature} (table '{table}')" for table, feature in missing)
    what = f"no pooling factor is given for {plural(len(missing), 'feature')}: {features}"
    advice = (
        "give the mean ids per sample, 1.0 where a sample has one id: default_pooling_factor=... "
        f"for all, constraints={{'{missing[0][0]}': ParameterConstraints(pooling_factors=[...])}} "
        "for a table, or model='model.yaml'"
    )
    if inputs.strict:
        raise InputError(f"{what}; {advice}")
    logger.warning("%s; TorchRec's default of %g is taken: %s", what, POOLING_FACTOR, advice)


def _warn_unknown_tables(inputs: UserInputs, tables: Collection[str]) -> None:
    """TorchRec ignores a constraint whose table it does not find."""
    for name in inputs.constraints:
        if name not in tables:
            near = did_you_mean(name, tables)
            logger.warning(
                "constraints are given for table '%s', which this module does not have%s",
                name,
                near,
            )


def tell_device_groups(
    module: nn.Module, constraints: Mapping[str, ParameterConstraints], device: str
) -> None:
    """Warn of tables of another device, which TorchRec's enumerator passes over without a word.

    The plan does not have them, and TorchRec does not shard a module with such a plan alone.

    Args:
        device: type of the topology's devices.
    """
    groups = ((t.table, constraints.get(t.table)) for t in find_tables(module))
    others = {
        table: constraint.device_group
        for table, constraint in groups
        if constraint is not None and constraint.device_group not in (None, device)
    }
    if others:
        logger.warning(
            "not planned, as in TorchRec: tables whose constraint has another device_group than "
            "the topology's %s: %s; plan them for a topology of their own and join the plans",
            device,
            ", ".join(f"'{table}' ({group})" for table, group in others.items()),
        )


def _captured_or_linears(
    module: nn.Module, tables: Sequence[Table], inputs: UserInputs
) -> CapturedDense | DenseArch:
    """The dense part at this batch; where it cannot be captured, linear layers each once a sample,
    and a warning."""
    try:
        return capture_dense(
            module,
            tables,
            inputs.batch_size,
            example_inputs=inputs.example_inputs,
            device=inputs.device,
            scale=False,
        )
    except InputError as error:
        layers = [(layer.in_features, layer.out_features) for layer in linears_outside(module)]
        logger.warning(
            "the dense part is not what the model runs: %s counted, each once a sample, because %s",
            f"{plural(len(layers), 'linear layer')} {'is' if len(layers) == 1 else 'are'}",
            error,
        )
    return DenseArch(
        in_features=layers[0][0] if layers else 1,
        bottom_mlp=(),
        top_mlp=(),
        interaction="concat",
        linears=tuple(layers),
    )


def _qcomm(sharders: Iterable[Any]) -> QComm:
    """Precision on the wire, from the codecs of the first sharder that has some."""
    for sharder in sharders:
        for codecs in (getattr(sharder, "qcomm_codecs_registry", None) or {}).values():
            return QComm(_precision(codecs.forward), _precision(codecs.backward))
    return QComm()


def _precision(codec: Any) -> str:
    quantized = getattr(codec, "quantized_dtype", torch.float32)
    if quantized not in DATA_TYPES:
        logger.warning("collectives in %s are not predicted; they are timed as in fp32", quantized)
    return DATA_TYPES.get(quantized, "fp32")


def parameter_constraints(workload: Workload) -> dict[str, ParameterConstraints]:
    """The constraints of the model file as TorchRec's `ParameterConstraints`, by table name.

    Raises:
        InputError: two modules have tables of one name that differ in what TorchRec
            identifies by name alone.
    """
    result: dict[str, ParameterConstraints] = {}
    for table in workload.tables:
        constraints = _their_constraints(table)
        if result.setdefault(table.name, constraints) != constraints:
            raise InputError(
                f"two modules have a table '{table.name}' with different features or "
                "constraints; TorchRec's planner identifies tables by name alone: rename one"
            )
    return result


def _their_constraints(table: Table) -> ParameterConstraints:
    wants = table.constraints
    load_factor = wants.cache_load_factor
    return ParameterConstraints(
        sharding_types=[str(t) for t in wants.sharding_types] if wants.sharding_types else None,
        compute_kernels=list(wants.compute_kernels) if wants.compute_kernels else None,
        min_partition=wants.min_partition,
        pooling_factors=[f.pooling_factor for f in table.features],
        num_poolings=[f.num_poolings for f in table.features],
        is_weighted=table.weighted,
        cache_params=CacheParams(load_factor=load_factor) if load_factor is not None else None,
        enforce_hbm=wants.enforce_hbm,
    )


def merge_constraints(
    known: Workload | None, given: Mapping[str, ParameterConstraints] | None
) -> dict[str, ParameterConstraints] | None:
    """The constraints of a model file, overridden by those given, table by table."""
    if known is None:
        return None if given is None else dict(given)
    return {**parameter_constraints(known), **(given or {})}
