"""The optimizers of a real model: fused into the backward of sharded tables, plain for the rest."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from predictor.errors import InputError, did_you_mean
from predictor.model.workload import Optimizer, Table, Workload
from shardopt.extras import needs_torchrec
from shardopt.torchrec.plan.module_tables import collection_of
from shardopt.torchrec.training.batch import computed_dense

with needs_torchrec():
    import torch
    from torch import nn
    from torchrec import optim as torchrec_optim
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.optimizers import in_backward_optimizer_filter

DENSE_OPTIMIZERS: dict[str, Any] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
}
SPARSE_OPTIMIZERS: dict[str, Any] = {
    Optimizer.SGD: torchrec_optim.SGD,
    Optimizer.EXACT_SGD: torchrec_optim.SGD,
    Optimizer.ROWWISE_ADAGRAD: torchrec_optim.RowWiseAdagrad,
    Optimizer.ADAGRAD: torchrec_optim.Adagrad,
    Optimizer.ADAM: torchrec_optim.Adam,
    Optimizer.PARTIAL_ROWWISE_ADAM: torchrec_optim.PartialRowWiseAdam,
    Optimizer.LAMB: torchrec_optim.LAMB,
    Optimizer.LARS_SGD: torchrec_optim.LarsSGD,
}


def apply_sparse_optimizers(
    model: nn.Module,
    workload: Workload,
    *,
    learning_rate: float = 0.01,
    unfused: Collection[str] = (),
    **kwargs: Any,
) -> None:
    """Fuse every table's optimizer into its backward; to be called before sharding.

    Args:
        unfused: keys (`Workload.keys`) of the tables that the plan gives the dense kernel, as
            replicated ones always have; the dense optimizer steps those.
        kwargs: further arguments of the optimizers, e.g. `eps`.
    """
    for key, table in zip(workload.keys, workload.tables, strict=True):
        if key not in unfused:
            kind = _optimizer(SPARSE_OPTIMIZERS, table.optimizer, f"table '{key}'")
            apply_optimizer_in_backward(
                kind, [table_weight(model, table)], {"lr": learning_rate, **kwargs}
            )


def table_weight(model: nn.Module, table: Table) -> nn.Parameter:
    """The whole weight of a table of an unsharded model."""
    collection = collection_of(model.sparse[table.module])
    tables = collection.embedding_bags if table.is_pooled else collection.embeddings
    return tables[table.name].weight


def dense_optimizer(
    model: nn.Module, workload: Workload, *, learning_rate: float = 0.01
) -> torch.optim.Optimizer:
    """The optimizer of what no fused one steps: MLPs, cross layers, tables of the dense kernel.

    Args:
        model: the whole one, or what `DistributedModelParallel` made of it.
    """
    kind = _optimizer(DENSE_OPTIMIZERS, computed_dense(workload).optimizer, "dense")
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    return kind(rest.values(), lr=learning_rate)


def set_matmul_precision(workload: Workload) -> None:
    """Let float32 matrix products use TF32 if the model says so; a setting of the process."""
    tf32 = computed_dense(workload).data_type == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")


def _optimizer(known: dict[str, Any], name: str, whose: str) -> Any:
    if name not in known:
        near = did_you_mean(name, known)
        raise InputError(f"{whose}: optimizer is '{name}'{near}; allowed are {', '.join(known)}")
    return known[name]
