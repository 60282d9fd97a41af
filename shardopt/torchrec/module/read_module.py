"""From a user's module to the workload that the search takes.

Reads what TorchRec's planner does not: features from the configs, optimizers, the dense layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from predictor.errors import InputError, did_you_mean
from predictor.model.captured.dense import CapturedDense
from predictor.model.workload import DenseArch, MeasuredDense, QComm, Table, Workload
from shardopt.config.model import variable_batches
from shardopt.extras import needs_torchrec
from shardopt.formatting import plural
from shardopt.torchrec.logs import logger
from shardopt.torchrec.module.dense_part import capture_dense, linears_outside
from shardopt.torchrec.module.read_table import (
    DATA_TYPES,
    UserInputs,
    features_without_factors,
    read_table,
)
from shardopt.torchrec.plan.module_tables import (
    find_embedding_modules,
    find_tables,
    other_processors,
)
from shardopt.torchrec.plan.options import group_by_table

with needs_torchrec():
    import torch
    from torch import nn
    from torchrec.distributed.embedding import get_ec_index_dedup
    from torchrec.distributed.planner.constants import POOLING_FACTOR
    from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption
    from torchrec.distributed.types import ModuleSharder

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
        train_pipeline="base" if known is None else known.train_pipeline,
        qcomm=_qcomm(by_type.values()),
    )


def not_priced(module: nn.Module, tables: Sequence[Table]) -> list[str]:
    """What embedding modules do beside what is priced, in a sentence each."""
    found = []
    for path, whole, _ in find_embedding_modules(module):
        if hasattr(whole, "_managed_collision_collection"):
            found.append(
                f"the managed collision of '{path}' is not priced, its lookups are: the remap of "
                "ids, its buffers and its exchange of ids come on top of the predicted time"
            )
        found += [
            f"the feature processor {kind} of '{path}' is not priced, its weighted lookups are: of "
            "TorchRec's PositionWeightedModule alone it is known what it runs"
            for kind in other_processors(whole)
        ]
    return found + variable_batches(tables)


def deduplicates(sharder: Any) -> bool:
    """Whether the modules of a sharder send the distinct ids of their batch only."""
    # that of a managed-collision module wraps the sharder of the collection
    of_collection = getattr(sharder, "_e_sharder", sharder)
    return bool(getattr(of_collection, "_use_index_dedup", False) or get_ec_index_dedup())


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
