"""FBGEMM's fused TBE, as TorchRec runs it: forward, and backward with the optimizer inside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from predictor.model.plan import ComputeKernel
from shardopt.calibrate.design.points import DTYPE, OPTIMIZER, Point
from shardopt.calibrate.rows import PARTS, Measurement, row_of_samples
from shardopt.measure.sampling import Timer, sample_passes, sample_stages

BATCHES = 4
"""Distinct batches in turn: one batch again and again would find its rows in the caches."""
LEARNING_RATE = 0.01
WARM_CACHE = 4
"""Distinct rows looked up before a cache counts as warm, as multiples of what it holds."""
MOST_WARMING = 400
"""Batches."""


def measure_lookup(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Rows ``forward`` and ``backward`` of one TBE.

    Their facts: per table ``[rows, dim, bags, ids, distinct rows]``, means over the batches.
    """
    launch = Launch(point.params, timer.device)
    return _measure_passes(
        point, launch, timer, seconds, lambda output: output.backward(launch.gradient)
    )


def measure_dense_lookup(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """The same of a TBE whose backward makes a dense gradient and no step."""
    import torch

    launch = Launch({**point.params, "kernel": ComputeKernel.DENSE}, timer.device)

    def backward(output: Any) -> Any:
        # not .backward(), which would add to the gradient of the sample before
        return torch.autograd.grad(output, launch.tbe.weights, launch.gradient)

    return _measure_passes(point, launch, timer, seconds, backward)


def measure_unpooled_lookup(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """The same of a TBE that gives a row for each id; its tables have one width."""
    import torch

    launch = Launch(point.params, timer.device)
    width = point.params["tables"][0]["dim"]
    gradient = torch.full((1, width), 1e-3, device=timer.device)

    def backward(output: Any) -> Any:
        nonlocal gradient
        if len(gradient) < len(output):
            gradient = gradient[:1].repeat(2 * len(output), 1)
        return output.backward(gradient[: len(output)])

    return _measure_passes(point, launch, timer, seconds, backward)


def _measure_passes(
    point: Point, launch: Launch, timer: Timer, seconds: float, run_backward: Callable[[Any], Any]
) -> list[Measurement]:
    batches = [launch.draw() for _ in range(BATCHES)]
    forward, backward = sample_passes(
        timer,
        lambda i: launch.tbe(*batches[i % BATCHES].arguments),
        run_backward,
        seconds,
    )
    facts = launch.facts(batches)
    return [
        row_of_samples(point, forward, "forward", tables=facts),
        row_of_samples(point, backward, "backward", tables=facts),
    ]


def measure_cached(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Rows ``prefetch``, ``forward`` and ``backward`` of one TBE with a cache, facts as of lookups.

    Every repeat looks up another batch, after as many others as fill the cache several times:
    a ring of few batches would be in the cache as a whole, and fetch nothing.
    """
    launch = Launch(point.params, timer.device)
    facts = launch.facts([launch.draw() for _ in range(BATCHES)])
    held = point.params["cache_load_factor"] * sum(table[0] for table in facts)
    warming = WARM_CACHE * held / max(sum(table[4] for table in facts), 1.0)

    def draw(_: int, __: object) -> Any:
        return launch.draw().arguments

    def prefetch(_: int, arguments: Any) -> Any:
        launch.tbe.prefetch(*arguments[:2])
        return arguments

    def forward(_: int, arguments: Any) -> Any:
        return launch.tbe(*arguments)

    def backward(_: int, output: Any) -> None:
        output.backward(launch.gradient)

    stages = (draw, prefetch, forward, backward)
    for i in range(min(int(np.ceil(warming)), MOST_WARMING)):
        made: Any = None
        for stage in stages:
            made = stage(i, made)
    spent = sample_stages(timer, stages, seconds)[1:]
    parts = zip(PARTS["lookup_cached"], spent, strict=True)
    return [row_of_samples(point, samples, part, tables=facts) for part, samples in parts]


@dataclass(frozen=True)
class DrawnLookup:
    """What one batch asks of a TBE.

    Args:
        arguments: ids, offsets and, where they are weighted, weights of the ids.
        counts: ids and distinct rows of each table.
    """

    arguments: tuple[Any, ...]
    counts: list[tuple[int, int]]


class Launch:
    """The TBE of a point, and batches for it."""

    def __init__(self, params: dict[str, Any], device: str) -> None:
        import torch

        self.params, self.device = params, device
        self.generator = torch.Generator(device).manual_seed(0)
        self.tables = [_DrawnTable(table, device) for table in params["tables"]]
        others: dict[str, Any] = {}
        if "cache_load_factor" in params:
            others["cache_load_factor"] = params["cache_load_factor"]
        if not params.get("pooled", True):
            from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode

            others["pooling_mode"] = PoolingMode.NONE
        self.tbe = make_tbe(
            [(table["rows"], table["dim"]) for table in params["tables"]],
            device,
            params.get("optimizer", OPTIMIZER),
            params.get("dtype", DTYPE),
            params.get("kernel", ComputeKernel.FUSED),
            **others,
        )

    @cached_property
    def gradient(self) -> Any:
        """Of the pooled outputs of all tables."""
        import torch

        width = sum(table["dim"] for table in self.params["tables"])
        return torch.full((self.params["batch"], width), 1e-3, device=self.device)

    def draw(self) -> DrawnLookup:
        """One more batch."""
        import torch

        drawn = [table.draw(self.params["batch"], self.generator) for table in self.tables]
        ids = torch.cat([ids for ids, _ in drawn])
        offsets = torch.cat([ids.new_zeros(1), torch.cat([n for _, n in drawn]).cumsum(0)])
        weights = (torch.full_like(ids, 0.5, dtype=torch.float32),)
        return DrawnLookup(
            (ids, offsets, *(weights if self.params.get("weighted", False) else ())),
            [(ids.numel(), int(torch.unique(ids).numel())) for ids, _ in drawn],
        )

    def facts(self, batches: list[DrawnLookup]) -> list[list[float]]:
        """``[tables, 5]``: rows, dim, bags; ids and distinct rows as counted."""
        means = np.mean([batch.counts for batch in batches], axis=0)
        return [
            [table["rows"], table["dim"], self.params["batch"], *mean.tolist()]
            for table, mean in zip(self.params["tables"], means, strict=True)
        ]


def make_tbe(
    shapes: list[tuple[int, int]],
    device: str,
    optimizer: str,
    dtype: str = DTYPE,
    kernel: str = ComputeKernel.FUSED,
    **others: Any,
) -> Any:
    """A TBE of tables of these rows and widths.

    Args:
        others: further arguments of FBGEMM's class.
    """
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        DenseTableBatchedEmbeddingBagsCodegen,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    cuda = device == "cuda"
    if kernel == ComputeKernel.DENSE:
        dense = DenseTableBatchedEmbeddingBagsCodegen(
            shapes, weights_precision=SparseType(dtype), use_cpu=not cuda
        )
        dense.weights.data.fill_(0.01)
        return dense
    on_gpu = {
        ComputeKernel.FUSED: EmbeddingLocation.DEVICE,
        ComputeKernel.FUSED_UVM: EmbeddingLocation.MANAGED,
        ComputeKernel.FUSED_UVM_CACHING: EmbeddingLocation.MANAGED_CACHING,
    }
    where = on_gpu[ComputeKernel(kernel)] if cuda else EmbeddingLocation.HOST
    compute = ComputeDevice.CUDA if cuda else ComputeDevice.CPU
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, where, compute) for rows, dim in shapes],
        optimizer=EmbOptimType(optimizer),
        learning_rate=LEARNING_RATE,
        weights_precision=SparseType(dtype),
        device=torch.device(device),
        **others,
    )
    # pages that nobody wrote are all the same page of zeros, and cheap to read
    for weights in tbe.split_embedding_weights():
        weights.fill_(0.01)
    return tbe


class _DrawnTable:
    """Draws the ids of one table."""

    def __init__(self, params: dict[str, Any], device: str) -> None:
        import torch

        self.params = params
        self.upto: Any = None
        self.place: Any = None
        if params["alpha"] > 0:
            ranks = torch.arange(1, params["rows"] + 1, dtype=torch.float64, device=device)
            self.upto = (ranks ** -params["alpha"]).cumsum(0)
            # the same popular rows in every batch, spread over the table
            seeded = torch.Generator(device).manual_seed(params["rows"])
            self.place = torch.randperm(params["rows"], generator=seeded, device=device)

    def draw(self, bags: int, generator: Any) -> tuple[Any, Any]:
        """Ids and bag sizes; each bag has floor or ceil of the pooling factor."""
        import torch

        device, rows = generator.device, self.params["rows"]
        least = int(self.params["pooling"])
        more = torch.rand(bags, generator=generator, device=device)
        lengths = least + (more < self.params["pooling"] - least).long()
        count = int(lengths.sum())
        if self.upto is None:
            return torch.randint(rows, (count,), generator=generator, device=device), lengths
        at = torch.rand(count, generator=generator, device=device, dtype=torch.float64)
        ranks = torch.searchsorted(self.upto, at * self.upto[-1])
        return self.place[ranks.clamp(max=rows - 1)], lengths
