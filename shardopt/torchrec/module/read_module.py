"""From a user's module to the workload that the search takes.

What TorchRec's planner never looks at is read here: features from the configs, the optimizer
wherever it was given, the dense layers. What no module holds is asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from predictor.errors import InputError, did_you_mean
from predictor.model.workload import DenseArch, QComm, Workload
from shardopt.extras import needs_torchrec
from shardopt.torchrec.module.homes import homes
from shardopt.torchrec.module.read_table import DATA_TYPES, Facts, read_table
from shardopt.torchrec.plan.options import by_table

with needs_torchrec():
    import torch
    from torch import nn
    from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption
    from torchrec.distributed.types import ModuleSharder

logger = logging.getLogger("shardopt")
UNPRICED = 0.01
"""Share of the dense parameters outside of linear layers from which on the user is told."""


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
    tables = []
    for found in offered.values():
        _check_kind(found[0])
        sharder = by_type[type(found[0].module[1])]
        tables.append(read_table(found, getattr(sharder, "fused_params", None) or {}, facts))
    _name_strangers(facts, {table.name for table in tables})
    known = facts.known
    return Workload(
        name=type(module).__name__ if known is None else known.name,
        batch_size=facts.batch_size,
        tables=tuple(tables),
        dense=_dense(module, {path for path, _ in offered}) if known is None else known.dense,
        train_pipeline="base" if known is None else known.train_pipeline,
        qcomm=_qcomm(by_type.values()),
    )


def _check_kind(option: ShardingOption) -> None:
    """Refuse what TorchRec plans and no law here predicts."""
    where = f"table '{option.name}' of module '{option.path}'"
    instead = "use TorchRec's EmbeddingShardingPlanner for this module"
    if option.dependency is not None:
        raise InputError(
            f"{where} is part of an embedding tower, whose tables must share a host; shardopt does "
            f"not plan towers: {instead}"
        )
    if option.compute_kernel.startswith("quant"):
        raise InputError(
            f"{where} is quantised for inference (compute kernel {option.compute_kernel}); "
            f"shardopt predicts training iterations: {instead}"
        )


def _name_strangers(facts: Facts, tables: Collection[str]) -> None:
    """TorchRec ignores a constraint whose table it does not find."""
    for name in facts.constraints:
        if name not in tables:
            near = did_you_mean(name, tables)
            logger.warning("constraints name table '%s', which is not sharded here%s", name, near)


def check_device_groups(
    module: nn.Module, constraints: Mapping[str, ParameterConstraints], device: str
) -> None:
    """Refuse tables of another device, which TorchRec's enumerator silently passes over.

    Args:
        device: type of the topology's devices.

    Raises:
        InputError: names the table.
    """
    for home in homes(module):
        told = constraints.get(home.table)
        if told is not None and told.device_group not in (None, device):
            raise InputError(
                f"table '{home.table}' of module '{home.path}': its constraint has device_group "
                f"'{told.device_group}', but the topology is of {device}, and one plan is for one "
                "device: plan a module with those tables alone, with a topology of theirs"
            )


def _dense(module: nn.Module, sharded: Iterable[str]) -> DenseArch:
    """The linear layers outside of what is sharded; all run behind the lookups."""
    outside = tuple(f"{path}." if path else "" for path in sharded)
    layers, dtype, others = [], torch.float32, 0
    for name, child in module.named_modules():
        if f"{name}.".startswith(outside):
            continue
        if isinstance(child, nn.Linear):
            layers.append((child.in_features, child.out_features))
            dtype = child.weight.dtype
        else:
            others += sum(p.numel() for p in child.parameters(recurse=False))
    if others > UNPRICED * sum(rows * columns for rows, columns in layers):
        logger.warning(
            "%d dense parameters are not in nn.Linear layers, and their time is not predicted; "
            "model= gives the dense part of a model file instead",
            others,
        )
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
    quantized = getattr(codec, "quantized_dtype", torch.float32)
    if quantized not in DATA_TYPES:
        logger.warning("collectives in %s are not predicted: they cost as in fp32", quantized)
    return DATA_TYPES.get(quantized, "fp32")
