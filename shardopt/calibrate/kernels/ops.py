"""Ops around the lookups as TorchRec calls them, the interaction, and the dense optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from predictor.model.workload import DenseArch, Feature, Table, Workload
from shardopt.calibrate.design.points import Point
from shardopt.calibrate.rows import Measurement, row_of_samples
from shardopt.measure.sampling import Timer, sample_passes

ROWS = 100_000
LONG_BYTES, FLOAT_BYTES = 8, 4


def measure_jagged(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """A KeyedJaggedTensor permuted, bucketized (as row-wise shards need it), split or joined.

    Facts: features, bags, ids, and their bytes once.
    """
    import torch

    p = point.params
    sparse = _sparse(p, timer.device)
    keys, values, lengths = sparse.keys(), sparse.values(), sparse.lengths()
    order = torch.arange(len(keys) - 1, -1, -1, dtype=torch.int32, device=timer.device)
    blocks = torch.full_like(order, -(-ROWS // p["buckets"]), dtype=torch.int64)
    half = len(keys) // 2
    parts = [half, len(keys) - half] if half else [len(keys)]
    pieces = sparse.split(parts)

    def permute() -> Any:
        table = lengths.view(len(keys), -1)
        return torch.ops.fbgemm.permute_2D_sparse_data(order, table, values, None, values.numel())

    def bucketize() -> Any:
        return torch.ops.fbgemm.block_bucketize_sparse_features(
            lengths,
            values,
            bucketize_pos=False,
            sequence=False,
            block_sizes=blocks,
            my_size=p["buckets"],
            weights=None,
            max_B=-1,
        )

    def split() -> Any:
        # a new one, as of every batch: it remembers where its keys begin
        return type(sparse)(keys, values, lengths=lengths).split(parts)

    calls: dict[str, Callable[[], Any]] = {
        "permute": permute,
        "bucketize": bucketize,
        "split": split,
        "concat": lambda: sparse.concat(pieces),
    }
    facts = {
        "features": len(keys),
        "bags": lengths.numel(),
        "ids": values.numel(),
        "bytes": LONG_BYTES * (lengths.numel() + values.numel()),
    }
    return [row_of_samples(point, timer.samples(calls[p["op"]], seconds), **facts)]


def _sparse(params: dict[str, Any], device: str) -> Any:
    """Ids of one rank."""
    from shardopt.training.batch import synthetic_batch

    tables = tuple(
        Table(f"t{i}", ROWS, FLOAT_BYTES, (Feature(f"f{i}", params["pooling"]),))
        for i in range(params["features"])
    )
    workload = Workload("jagged", params["batch"], tables, DenseArch(1, (1,), (1,)))
    return synthetic_batch(workload).sparse[tables[0].module].to(device)


def measure_pooled(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Pooled embeddings reordered (as column-wise shards need it), joined, or taken apart.

    Facts: pieces, and the bytes of all of them once.
    """
    import torch

    dims, batch = point.params["dims"], point.params["batch"]
    whole = torch.ones(batch, sum(dims), device=timer.device, requires_grad=True)
    pieces = [torch.ones(batch, dim, device=timer.device, requires_grad=True) for dim in dims]
    forward, inputs = {
        "permute": (lambda: _permute(whole, dims), [whole]),
        "cat": (lambda: torch.cat(pieces, dim=1), pieces),
        "split": (lambda: torch.split(whole, dims, dim=1), [whole]),
    }[point.params["op"]]
    facts = {"pieces": len(dims), "bytes": FLOAT_BYTES * whole.numel()}
    return measure_both_passes(point, forward, inputs, timer, seconds, facts)


def _permute(whole: Any, dims: list[int]) -> Any:
    from fbgemm_gpu.permute_pooled_embedding_modules import PermutePooledEmbeddings

    backwards = list(range(len(dims)))[::-1]
    return PermutePooledEmbeddings(dims, backwards, whole.device)(whole)


def measure_interaction(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Dot products of all pairs of vectors: the batched product alone, or the whole layer."""
    import torch

    from shardopt.training.model import Dot

    p = point.params
    shape = (p["batch"], p["vectors"], p["dim"])
    stacked = torch.ones(shape, device=timer.device, requires_grad=True)
    single = [
        torch.ones(p["batch"], p["dim"], device=timer.device, requires_grad=True)
        for _ in range(p["vectors"])
    ]
    dot = Dot(p["vectors"], torch.device(timer.device))
    forward, inputs = {
        "bmm": (lambda: torch.bmm(stacked, stacked.transpose(1, 2)), [stacked]),
        "dot": (lambda: dot(single), single),
    }[p["op"]]
    return measure_both_passes(point, forward, inputs, timer, seconds, {})


def measure_both_passes(
    point: Point,
    forward: Callable[[], Any],
    inputs: list[Any],
    timer: Timer,
    seconds: float,
    facts: dict[str, Any],
) -> list[Measurement]:
    """Rows `forward` and `backward`; gradients are those of ``inputs``, which keep none."""
    import torch

    made = forward()
    outputs = made if isinstance(made, tuple) else (made,)
    gradients = [torch.full_like(output, 1e-3) for output in outputs]

    def backward(made: Any) -> Any:
        # not .backward(), which would add to the gradient of the sample before
        return torch.autograd.grad(made, inputs, gradients)

    spent = sample_passes(timer, lambda _: forward(), backward, seconds)
    rows = zip(("forward", "backward"), spent, strict=True)
    return [row_of_samples(point, samples, part, **facts) for part, samples in rows]


def measure_optimizer(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """A step over the weights and biases of square layers; facts: tensors and their elements."""
    import torch

    from shardopt.training.loop import DENSE_OPTIMIZERS

    width = point.params["width"]
    shapes = [(width, width), (width,)] * point.params["layers"]
    weights = [torch.nn.Parameter(torch.ones(shape, device=timer.device)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.full_like(weight, 1e-3)
    optimizer = DENSE_OPTIMIZERS[point.params["op"]](weights, lr=0.01)
    elements = sum(weight.numel() for weight in weights)
    samples = timer.samples(optimizer.step, seconds)
    return [row_of_samples(point, samples, tensors=len(weights), elements=elements)]
