"""The training loop of a real model, and its optimizers: fused into the backward of sharded tables,
plain for the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from copy import copy
from functools import partial
from typing import Any

from predictor.errors import InputError
from predictor.model.plan import ComputeKernel, ShardingPlan
from predictor.model.workload import Table, Workload
from shardopt.extras import needs_torchrec
from shardopt.torchrec.capture.step import DENSE_OPTIMIZERS
from shardopt.torchrec.convert import to_torchrec
from shardopt.torchrec.private import wrapped
from shardopt.torchrec.tables import SPARSE_OPTIMIZERS, fill_cheaply
from shardopt.training.batch import Batch, computed_dense
from shardopt.training.model import ModelBuilder, build_model

with needs_torchrec():
    import torch
    from torch import nn
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.fbgemm_qcomm_codec import (
        CommType,
        QCommsConfig,
        get_qcomm_codecs_registry,
    )
    from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.train_pipeline import train_pipelines
    from torchrec.distributed.types import ShardingEnv
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.optimizers import in_backward_optimizer_filter


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
            kind, weight = SPARSE_OPTIMIZERS[table.optimizer], table_weight(model, table)
            apply_optimizer_in_backward(kind, [weight], {"lr": learning_rate, **kwargs})


def table_weight(model: nn.Module, table: Table) -> nn.Parameter:
    """The whole weight of a table of an unsharded model."""
    collection = wrapped(model.sparse[table.module])
    tables = collection.embedding_bags if table.is_pooled else collection.embeddings
    return tables[table.name].weight


def dense_optimizer(
    model: nn.Module, workload: Workload, *, learning_rate: float = 0.01
) -> torch.optim.Optimizer:
    """The optimizer of what no fused one steps: MLPs, cross layers, tables of the dense kernel.

    Args:
        model: the whole one, or what `DistributedModelParallel` made of it.
    """
    kind = DENSE_OPTIMIZERS[computed_dense(workload).optimizer]
    rest = dict(in_backward_optimizer_filter(model.named_parameters()))
    # PyTorch's default steps one parameter after the other as soon as a table is replicated: its
    # slice is no plain Parameter (`_default_to_fused_or_foreach` of torch.optim)
    foreach = any(parameter.is_cuda for parameter in rest.values()) or None
    built: torch.optim.Optimizer = kind(rest.values(), lr=learning_rate, foreach=foreach)
    return built


def set_matmul_precision(workload: Workload) -> None:
    """Let float32 matrix products use TF32 if the model says so; a setting of the process."""
    tf32 = computed_dense(workload).data_type == "tf32"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")


PIPELINES: dict[str, Any] = {
    "base": train_pipelines.TrainPipelineBase,
    "sparse_dist": train_pipelines.TrainPipelineSparseDist,
    "prefetch_sparse_dist": train_pipelines.PrefetchTrainPipelineSparseDist,
    # from the first batch on
    "semi_sync": partial(train_pipelines.TrainPipelineSemiSync, start_batch=0),
}
NEED_GPUS = {
    "prefetch_sparse_dist": "fills GPU caches",
    "semi_sync": "keeps tensors for streams of GPUs",
}
"""Train pipeline -> what it does that TorchRec has for GPUs alone."""


class Training:
    """One sharded model with its optimizers and its pipeline.

    Args:
        ring: this rank's batches, which are cycled through; several trainings may share them.
        build: makes the model from the workload; the DLRM that it describes unless given.
        group: the process group; the default one if None.

    `sharded` is the `DistributedModelParallel`; `model` the model inside, its embedding modules
    sharded.

    Raises:
        PlanError: TorchRec cannot run the plan.
        InputError: the pipeline needs a GPU.
    """

    def __init__(
        self,
        workload: Workload,
        plan: ShardingPlan,
        device: torch.device,
        ring: Sequence[Batch],
        build: ModelBuilder = build_model,
        group: Any = None,
    ) -> None:
        if workload.stash_optimizer_state or any(t.stash_weights for t in workload.tables):
            raise InputError(
                "stashing is predicted, and not run here: leave out stash_weights and "
                "stash_optimizer_state"
            )
        why = NEED_GPUS.get(workload.train_pipeline)
        if why is not None and device.type == "cpu":
            raise InputError(
                f"train_pipeline {workload.train_pipeline} {why} and cannot run on CPUs; "
                "set it to base or sparse_dist, or train on GPUs with NCCL",
                inputs=("backend",),
            )
        model = build(workload, "meta")
        self.model = model
        unfused = [k for k, t in plan.tables.items() if t.compute_kernel is ComputeKernel.DENSE]
        apply_sparse_optimizers(model, workload, unfused=unfused)
        fill_cheaply(model)
        self.sharded = DistributedModelParallel(
            model,
            env=None if group is None else ShardingEnv.from_process_group(group),
            device=device,
            plan=to_torchrec(plan, model, device=device),
            sharders=_sharders(workload),
        )
        optimizer = dense_optimizer(self.sharded, workload)
        kind = PIPELINES[workload.train_pipeline]
        self.pipeline = kind(self.sharded, optimizer, device)
        self.batches = itertools.cycle(ring)

    def on(self, ring: Sequence[Batch]) -> Training:
        """The same model on other batches. The pipeline ``base`` has one batch of the ring before
        in hand; others hold more of them, and steps of two rings cannot be told apart there."""
        other = copy(self)
        other.batches = itertools.cycle(ring)
        return other

    def step(self) -> None:
        """Run an iteration: forward, backward with the fused updates, dense optimizer step."""
        self.pipeline.progress(self.batches)


def _sharders(workload: Workload) -> list[Any]:
    """Make the sharders, with quantised collectives and distinct ids where the model asks."""
    qcomm, dedup = workload.qcomm, any(table.index_dedup for table in workload.tables)
    codecs = None
    if (qcomm.forward, qcomm.backward) != ("fp32", "fp32"):
        config = QCommsConfig(
            forward_precision=CommType(qcomm.forward), backward_precision=CommType(qcomm.backward)
        )
        codecs = get_qcomm_codecs_registry(config)
    return [
        EmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs),
        EmbeddingCollectionSharder(qcomm_codecs_registry=codecs, use_index_dedup=dedup),
        FeatureProcessedEmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs),
    ]
