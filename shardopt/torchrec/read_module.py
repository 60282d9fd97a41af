"""From a user's module to the workload that the search takes.

Reads what TorchRec's planner does not: features from the configs, optimizers from the backward or
the sharder, the dense part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from inspect import Parameter, signature
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from predictor.errors import InputError, did_you_mean
from predictor.model.captured import CapturedDense
from predictor.model.plan import HASHED, ComputeKernel, ShardingType
from predictor.model.workload import (
    WEIGHT_BITS,
    Constraints,
    Dense,
    DenseArch,
    Feature,
    Optimizer,
    QComm,
    Table,
    Workload,
)
from shardopt.config import load_model
from shardopt.config.model import rough_lookups, untaken_types, variable_batches
from shardopt.extras import needs_torchrec
from shardopt.formatting import listed, plural
from shardopt.logs import logger
from shardopt.torchrec.capture.capture import capture_dense
from shardopt.torchrec.capture.inputs import linears_outside
from shardopt.torchrec.options import CUSTOMIZED, group_by_table, kernel_of, store_caches
from shardopt.torchrec.pipelines import Assumed
from shardopt.torchrec.private import (
    deduplicates_ids,
    feature_processors,
    optimizers_in_backward,
    remaps_ids,
)
from shardopt.torchrec.tables import (
    SPARSE_OPTIMIZERS,
    ModuleTable,
    feature_processors_of,
    find_embedding_modules,
    find_tables,
)

with needs_torchrec():
    import torch
    from torch import nn
    from torchrec.distributed.embedding import get_ec_index_dedup
    from torchrec.distributed.planner.constants import POOLING_FACTOR
    from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption
    from torchrec.distributed.types import CacheParams, KeyValueParams, ModuleSharder

PLACEHOLDER = [1, 1]
"""Size of the shards that NVIDIA's `DynamicEmbeddingEnumerator` gives a table of its own."""
DATA_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class UserInputs(NamedTuple):
    """User's inputs that no module holds.

    Args:
        batch_size: samples per rank.
        constraints: TorchRec's, by table name.
        known: a workload, read from a model file, with pooling factors and index distributions by
            feature, train pipeline and dense part; None where there is none.
        default_pooling_factor: of features for which nothing is given; None for TorchRec's 1,
            with a warning.
        strict: features for which nothing is given are an error.
        example_inputs: what the module's forward takes; None to make it from the features.
        device: type of the topology's devices.
        measured: features of a stats file, by name; their pooling factors hold.
        train_pipeline: how the script's is priced; None for the model file's, else ``base``.
    """

    batch_size: int
    constraints: Mapping[str, ParameterConstraints]
    known: Workload | None
    default_pooling_factor: float | None = None
    strict: bool = False
    example_inputs: Any = None
    device: str = "cuda"
    measured: Mapping[str, Feature] = MappingProxyType({})
    train_pipeline: Assumed | None = None

    @property
    def pipeline(self) -> str:
        """Train pipeline that is predicted."""
        if self.train_pipeline is not None:
            return self.train_pipeline.pipeline
        return "base" if self.known is None else self.known.train_pipeline

    @property
    def stashes_optimizer(self) -> bool:
        """Tell if the states of the dense optimizer are stashed."""
        if self.train_pipeline is not None:
            return self.train_pipeline.stashes == "optimizer"
        return self.known is not None and self.known.stash_optimizer_state

    def stashes(self, table: ModuleTable) -> bool:
        """Tell if the weights of a table are stashed."""
        if self.train_pipeline is not None:
            return table.stash_weights and self.train_pipeline.stashes == "weights"
        tables = self.known.tables if self.known else ()
        return any(t.stash_weights for t in tables if t.name == table.table)

    def constraint(self, table: str) -> ParameterConstraints:
        """Return the constraint of a table; an empty one if there is none."""
        return self.constraints.get(table) or ParameterConstraints()

    def known_features(self, table: str) -> dict[str, Feature]:
        """Features of a table in the model file, and those of a stats file, by name."""
        tables = self.known.tables if self.known else ()
        lengths = {
            name: Feature(
                name,
                f.pooling_factor,
                pooling_factor_std=f.pooling_factor_std,
                pooling_factor_max=f.pooling_factor_max,
                length_correlation=f.length_correlation,
            )
            for name, f in self.measured.items()
        }
        return lengths | {f.name: f for t in tables if t.name == table for f in t.features}


def known_workload(model: str | PathLike[str] | Workload | None) -> Workload | None:
    """Load the workload of a model file, where one is given."""
    return model if isinstance(model, Workload | None) else load_model(Path(model))


def check_pooling_factor(default: float | None) -> None:
    """Refuse a default that is no mean number of ids.

    Raises:
        InputError: it is not above 0.
    """
    if default is not None and not 0 < default < math.inf:
        raise InputError(
            f"default_pooling_factor is {default}; give the mean ids per sample, above 0"
        )


class OfferedTable:
    """A table of a user's module as TorchRec's planner sees it.

    Args:
        options: what TorchRec offers for it; it may have the types and kernels that they name.
        sharder: of its module, or TorchRec's data of that.

    `config` is what the module says of it; None where no config below the module, which is sharded
    as a whole, is its.
    """

    def __init__(self, options: Sequence[ShardingOption], sharder: Any) -> None:
        self.options, self.option = options, options[0]
        self.sharder = sharder
        self.fused_params: Mapping[str, Any] = getattr(sharder, "fused_params", None) or {}
        name, module = self.option.name, self.option.module[1]
        self.config = next((table for table in find_tables(module) if table.table == name), None)

    def why_not_predicted(self) -> str | None:
        """Name what shardopt has no model for and TorchRec plans; None if there is nothing."""
        option, kernels = self.option, {kernel_of(o) for o in self.options}
        placeholders = all(list(shard.size) == PLACEHOLDER for shard in option.shards)
        if option.dependency is not None:
            return "it is part of an embedding tower, whose tables must share a host"
        if placeholders and int(option.tensor.numel()) > len(option.shards):
            return "dynamicemb's own planner places it"
        if kernels.isdisjoint(ComputeKernel):
            return f"it can only have the compute kernels {', '.join(sorted(kernels))}"
        if option.tensor.dtype not in DATA_TYPES:
            return f"its weights are {option.tensor.dtype}"
        unknown = _unknown_settings(self.options)
        if unknown:
            return f"it has {', '.join(unknown)}, which this version of shardopt does not know"
        if self.config is None:
            return (
                "no EmbeddingBagCollection or EmbeddingCollection below "
                f"{type(option.module[1]).__name__} has a config for it"
            )
        return None if self.optimizer in list(Optimizer) else f"it is stepped by {self.optimizer}"

    @property
    def optimizer(self) -> str:
        """Optimizer of the backward (`apply_optimizer_in_backward`) or fused into the module
        (`FusedEmbeddingBagCollection`), else that of the sharder's fused_params; its class where it
        is none of `Optimizer`. FBGEMM's own default is plain SGD."""
        for kind in self._optimizer_classes():
            names = (n for n, k in SPARSE_OPTIMIZERS.items() if k.__name__ == kind.__name__)
            return str(next(names, kind.__name__))
        fused = self.fused_params.get("optimizer", Optimizer.EXACT_SGD)
        return str(getattr(fused, "value", fused))

    @property
    def names_optimizer(self) -> bool:
        """Tell if the optimizer is set anywhere, rather than FBGEMM's default."""
        return bool(self._optimizer_classes()) or "optimizer" in self.fused_params

    def _optimizer_classes(self) -> list[Any]:
        own = getattr(self.option.module[1], "optimizer_type", None)
        kinds = optimizers_in_backward(self.option.tensor)
        return kinds if own is None else [*kinds, own()]

    def features_without_factors(self, inputs: UserInputs) -> list[str]:
        """List the features without a pooling factor from any source."""
        if self.config is None or self._given_factors(inputs) is not None:
            return []
        from_file = inputs.known_features(self.config.table)
        return [name for name in self.config.features if name not in from_file]

    def read(self, inputs: UserInputs) -> Table:
        """The table of a workload.

        Raises:
            InputError: a fact contradicts the module, or shardopt does not predict such a table
                (`why_not_predicted`); says which.
        """
        option, config = self.option, self.config
        where = f"table '{option.name}' of module '{option.path}'"
        problem = self.why_not_predicted()
        if problem or config is None:
            raise InputError(f"{where}: {problem}, which shardopt does not predict")
        # the config's type if shardopt knows it, as in `create_sharding_infos_by_sharding`
        supported = config.data_type in WEIGHT_BITS
        return Table(
            name=option.name,
            num_embeddings=config.shape[0],
            embedding_dim=config.shape[1],
            features=self._features(config, inputs, where),
            module=option.path or "ebc",
            data_type=config.data_type if supported else DATA_TYPES[option.tensor.dtype],
            pooling=config.pooling,
            weighted=self._weighted(inputs),
            optimizer=self.optimizer,
            constraints=self._constraints(inputs),
            index_dedup=config.pooling == "none" and self._deduplicates,
            storage="dynamicemb" if kernel_of(option) in HASHED else "torchrec",
            stash_weights=inputs.stashes(config),
        )

    @property
    def _deduplicates(self) -> bool:
        """Tell if ranks send the distinct ids of their batch only."""
        return deduplicates_ids(self.sharder) or bool(get_ec_index_dedup())

    def _weighted(self, inputs: UserInputs) -> bool:
        """Tell if lookups are weighted, as in `ShardPerfContext.build_shard_perf_contexts`
        (planner/estimator/types.py): the module overrides the constraint, and feature processors
        weight the lookup. TorchRec's enumerator does not see those of a
        FeatureProcessedEmbeddingBagCollection."""
        option = self.option
        weighted = feature_processors(option.module[1]) is not None or option.is_weighted
        if weighted is None:
            weighted = inputs.constraint(option.name).is_weighted
        return bool(weighted or option.has_feature_processor)

    def _features(self, config: ModuleTable, inputs: UserInputs, where: str) -> tuple[Feature, ...]:
        """Return features with the pooling factors that TorchRec rates by, else the model file's,
        else the default."""
        from_file, wants = inputs.known_features(config.table), inputs.constraint(config.table)
        # the order in which the lists of the constraint name the features; TorchRec does not look
        # whether its names are those of the module
        names: Sequence[str] = wants.feature_names or ()
        names = names if sorted(names) == sorted(config.features) else config.features
        default = inputs.default_pooling_factor or POOLING_FACTOR
        by_name = {
            name: replace(
                from_file.get(name) or Feature(name, default),
                position_weights=config.position_weights.get(name, 0),
            )
            for name in config.features
        }
        factors = self._given_factors(inputs)
        count = len(names if factors is None else factors)
        poolings = _list(self.option.num_poolings or wants.num_poolings, count)
        sizes = _list(wants.batch_sizes, count) or [inputs.batch_size] * count
        batches = [size / inputs.batch_size for size in sizes]
        if factors is not None and count != len(names):
            # count as TorchRec does: it never looks at how many features the table has
            # (docs/decisions/0034-hook.md)
            weights = zip(factors, poolings or [1.0] * count, batches, strict=True)
            share = sum(math.prod(of_feature) for of_feature in weights) / len(names)
            logger.warning(
                "%s has %d features (%s), but its constraint has %d pooling_factors; as in "
                "TorchRec their sum counts for the table: %g ids per sample and feature; give one "
                "per feature",
                where,
                len(names),
                listed(names),
                count,
                share,
            )
            return tuple(
                replace(f, pooling_factor=share, num_poolings=1.0) for f in by_name.values()
            )
        for index, name in enumerate(names):
            feature = by_name[name]
            factor = feature.pooling_factor if factors is None else float(factors[index])
            if not factor >= 0:
                raise InputError(
                    f"{where}: feature '{name}' has pooling factor {factor}; "
                    "give the mean ids per sample, at least 0"
                )
            # a feature with another batch size is pooled more, or less, often per sample
            pooled = (poolings[index] if poolings else feature.num_poolings) * batches[index]
            by_name[name] = replace(feature, pooling_factor=factor, num_poolings=pooled)
        return tuple(by_name.values())

    def _given_factors(self, inputs: UserInputs) -> Sequence[float] | None:
        """The pooling factors that the enumerator was given, else the planner; None if neither was.

        Where none are given `ParameterConstraints` fills in its own constant object, which a user's
        1.0 is not.
        """
        wants = inputs.constraint(self.option.name)
        for values in (self.option.input_lengths, wants.pooling_factors):
            if values and not (len(values) == 1 and values[0] is POOLING_FACTOR):
                return values
        return None

    def _constraints(self, inputs: UserInputs) -> Constraints:
        """Return the user's constraints, as far as the enumerator offers them.

        A load factor that no constraint sets is the sharder's, as for `EmbeddingStorageEstimator`
        (planner/shard_estimators.py) and FBGEMM.
        """
        option, wants = self.option, inputs.constraint(self.option.name)
        pairs = {(o.sharding_type, kernel_of(o)) for o in self.options}
        # an enumerator may offer several, as TorchEasyRec's does for hash tables
        factors = {o.cache_load_factor for o in self.options if o.compute_kernel == CUSTOMIZED}
        factor = option.cache_load_factor if len(factors) < 2 else None
        if factor is None:
            factor = self.fused_params.get("cache_load_factor")
        kernels = tuple(k for k in wants.compute_kernels or () if k != CUSTOMIZED)
        caches = store_caches(option)
        return Constraints(
            sharding_types=tuple(map(ShardingType, wants.sharding_types or ())) or None,
            compute_kernels=kernels or None,
            min_partition=wants.min_partition,
            cache_load_factor=factor,
            enforce_hbm=option.enforce_hbm,
            device_group=wants.device_group,
            offered=tuple((t, k) for t in ShardingType for k in ComputeKernel if (t, k) in pairs),
            max_l1_cache_size=caches.get("max_l1_cache_size"),
            l2_cache_size=caches.get("l2_cache_size"),
        )


OPTION_FIELDS = (
    *("name", "tensor", "module", "input_lengths", "batch_size", "sharding_type", "partition_by"),
    *("compute_kernel", "shards", "cache_params", "enforce_hbm", "stochastic_rounding"),
    *("bounds_check_mode", "dependency", "is_pooled", "feature_names", "output_dtype"),
    *("key_value_params", "num_poolings", "stash_weights"),
)
"""Arguments of a `ShardingOption` of TorchRec 1.7 to 1.9."""


def _unknown_settings(options: Sequence[ShardingOption]) -> list[str]:
    """List what a later TorchRec sets on options: shards that the search cuts would not follow."""
    arguments = signature(type(options[0])).parameters.values()
    usual = {
        argument.name: argument.default
        for argument in arguments
        if argument.name not in OPTION_FIELDS and argument.default is not Parameter.empty
    }
    settings = {
        f"{name}={value!r}"
        for option in options
        for name, default in usual.items()
        if (value := getattr(option, name, default)) != default
    }
    return sorted(settings)


def _list(values: Sequence[float] | None, count: int) -> Sequence[float] | None:
    """One number a feature; TorchRec asserts that a list of another length is not there."""
    return values if values and len(values) == count else None


def tables_of(
    options: Iterable[ShardingOption], sharder_of: Callable[[ShardingOption], Any]
) -> list[OfferedTable]:
    """The tables that a search space is of, in its order.

    Args:
        sharder_of: an option's sharder, or TorchRec's data of it.
    """
    return [
        OfferedTable(options_of_table, sharder_of(options_of_table[0]))
        for options_of_table in group_by_table(options).values()
    ]


def by_module(sharders: Sequence[Any]) -> Callable[[ShardingOption], Any]:
    """Finds the sharder of an option."""
    by_type = {sharder.module_type: sharder for sharder in sharders}
    return lambda option: by_type.get(type(option.module[1]))


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
    offered = tables_of(options, by_module(sharders))
    tell_missing_factors(offered, inputs)
    tables = [table.read(inputs) for table in offered]
    for note in not_priced(module, tables):
        logger.warning("%s", note)
    names = {o.name for o in options} | {t.table for t in find_tables(module)}
    unknown = sorted(inputs.constraints.keys() - names)
    if unknown:  # TorchRec ignores them
        logger.warning(
            "constraints are given for %s, which this module does not have: %s",
            plural(len(unknown), "table"),
            listed(f"'{name}'{did_you_mean(name, names)}" for name in unknown),
        )
    model = inputs.known
    if model is not None:
        dense: Dense = model.dense
    elif dense_of is not None:
        dense = dense_of(tables)
    else:
        dense = _captured_or_linears(module, tables, inputs)
    return Workload(
        name=type(module).__name__ if model is None else model.name,
        batch_size=inputs.batch_size,
        tables=tuple(tables),
        dense=dense,
        train_pipeline=inputs.pipeline,
        qcomm=_qcomm(sharders),
        stash_optimizer_state=inputs.stashes_optimizer,
    )


def not_priced(module: nn.Module, tables: Sequence[Table]) -> list[str]:
    """List the work of embedding modules that is not priced, in a sentence each."""
    notes = []
    stashed = {table.name for table in tables if table.stash_weights}
    marked = [t.table for t in find_tables(module) if t.stash_weights and t.table not in stashed]
    if marked:
        notes.append(
            f"tables {listed(map(repr, marked))} have stash_weights, but the train pipeline "
            "stashes none: their weights are priced as on the device"
        )
    types: dict[str, list[str]] = {}
    for table in find_tables(module):
        if table.data_type not in WEIGHT_BITS:
            types.setdefault(table.data_type, []).append(f"'{table.table}'")
    notes += [
        f"{listed(names)} {'has' if len(names) == 1 else 'have'} {kind} weights, which are counted "
        "and priced as fp16: memory and time are at most what is said"
        for kind, names in types.items()
    ]
    for path, whole, inner in find_embedding_modules(module):
        if whole is not inner and not remaps_ids(whole) and feature_processors(whole) is None:
            notes.append(
                f"the {type(whole).__name__} '{path}' is priced as the {type(inner).__name__} in "
                "it: what else it runs comes on top of the predicted time"
            )
        if remaps_ids(whole):
            notes.append(
                f"the managed collision of '{path}' is not priced, its lookups are: the remap of "
                "ids, its buffers and its exchange of ids come on top of the predicted time"
            )
        notes += [
            f"the feature processor {kind} of '{path}' is not priced, its weighted lookups are: of "
            "TorchRec's PositionWeightedModule alone it is known what it runs"
            for kind in feature_processors_of(whole)[1]
        ]
    types_of = ((table.name, table.data_type, table.optimizer) for table in tables)
    return notes + untaken_types(types_of) + variable_batches(tables) + rough_lookups(tables)


def tell_missing_factors(offered: Iterable[OfferedTable], inputs: UserInputs) -> None:
    """Say once which features have no pooling factor from any source, if no default is given.

    Raises:
        InputError: the same, if the inputs are strict.
    """
    if inputs.default_pooling_factor is not None:
        return
    missing = [(t.option.name, f) for t in offered for f in t.features_without_factors(inputs)]
    if not missing:
        return
    features = listed(f"{feature} (table '{table}')" for table, feature in missing)
    problem = f"no pooling factor is given for {plural(len(missing), 'feature')}: {features}"
    advice = (
        "give the mean ids per sample, 1.0 where a sample has one id: default_pooling_factor=... "
        f"for all, constraints={{'{missing[0][0]}': ParameterConstraints(pooling_factors=[...])}} "
        "for a table, or model='model.yaml'"
    )
    if inputs.strict:
        raise InputError(f"{problem}; {advice}")
    logger.warning("%s; TorchRec's default of %g is taken: %s", problem, POOLING_FACTOR, advice)


def tell_device_groups(
    module: nn.Module, constraints: Mapping[str, ParameterConstraints], device: str
) -> None:
    """Warn about tables of another device, which TorchRec's enumerator skips silently.

    The plan does not have them, and TorchRec does not shard a module with such a plan alone.

    Args:
        device: type of the topology's devices.
    """
    groups = ((t.table, constraints.get(t.table)) for t in find_tables(module))
    other_groups = {
        table: constraint.device_group
        for table, constraint in groups
        if constraint is not None and constraint.device_group not in (None, device)
    }
    if other_groups:
        logger.warning(
            "not planned, as in TorchRec: tables whose constraint has another device_group than "
            "the topology (%s): %s; plan them for a topology of that group and merge the plans",
            device,
            listed(f"'{table}' ({group})" for table, group in other_groups.items()),
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
            "the dense part is only estimated: %s counted, each once per sample, because %s",
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
        wants, caches = table.constraints, table.constraints.key_value_params
        factor = wants.cache_load_factor
        constraints = ParameterConstraints(
            sharding_types=[str(t) for t in wants.sharding_types] if wants.sharding_types else None,
            compute_kernels=list(wants.compute_kernels) if wants.compute_kernels else None,
            min_partition=wants.min_partition,
            pooling_factors=[f.pooling_factor for f in table.features],
            num_poolings=[f.num_poolings for f in table.features],
            is_weighted=table.weighted,
            cache_params=None if factor is None else CacheParams(load_factor=factor),
            enforce_hbm=wants.enforce_hbm,
            key_value_params=KeyValueParams(**caches) if caches else None,
        )
        if result.setdefault(table.name, constraints) != constraints:
            raise InputError(
                f"two modules have a table '{table.name}' with different features or "
                "constraints; TorchRec's planner identifies tables by name alone: rename one"
            )
    return result


def merge_constraints(
    model: Workload | None, constraints: Mapping[str, ParameterConstraints] | None
) -> dict[str, ParameterConstraints] | None:
    """The constraints of a model file, overridden by those given, table by table."""
    if model is None:
        return None if constraints is None else dict(constraints)
    return {**parameter_constraints(model), **(constraints or {})}
