"""Kernels that one rank times: what a point of each family runs.

Points and fits are where the families are declared; this module and `together` alone need torch.
"""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from predictor.model.plan import ComputeKernel
from predictor.model.workload import DenseArch, Feature, Optimizer, Table, Workload
from predictor.units import GIB, MIB
from shardopt.calibrate.host import MIX
from shardopt.calibrate.lookups import DTYPE, OPTIMIZER, lookup_points
from shardopt.calibrate.moves import SOFTMAX_WIDTH
from shardopt.calibrate.points import CalibrationSettings, Point
from shardopt.calibrate.rows import Measurement, row_of_failure, row_of_samples, rows_of_passes
from shardopt.extras import needs_torchrec
from shardopt.measure.sampling import (
    CpuTimer,
    Samples,
    Timer,
    sample_gradients,
    sample_passes,
    sample_stages,
    timer_of,
)
from shardopt.torchrec.capture.step import DENSE_OPTIMIZERS
from shardopt.training.batch import batch_ring, synthetic_batch
from shardopt.training.model import Dot

with needs_torchrec():
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        DenseTableBatchedEmbeddingBagsCodegen,
        SplitTableBatchedEmbeddingBagsCodegen,
    )
    from torch.autograd import DeviceType
    from torch.nn import functional
    from torch.profiler import ProfilerActivity, profile

JAGGED_ROWS = 100_000
LONG_BYTES, FLOAT_BYTES = 8, 4
BATCHES = 4
"""Distinct batches in turn: the rows of a single batch would stay in the caches."""
LEARNING_RATE = 0.01
WARM_CACHE = 4
"""Distinct rows looked up before a cache counts as warm, as a multiple of its rows."""
MOST_WARMING = 400
"""Most batches to warm a cache."""


def measure_lookup(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Measure rows ``forward`` and ``backward`` of one TBE.

    Their facts are per table ``[rows, dim, bags, ids, distinct rows]``, means over the batches.
    """
    dense = {"kernel": ComputeKernel.DENSE} if point.family == "lookup_dense" else {}
    launch = Launch({**point.params, **dense}, timer.device)
    batches = [arguments for arguments, _ in launch.ring]
    passes = sample_passes(
        timer, lambda i: launch.tbe(*batches[i % BATCHES]), launch.backward, seconds
    )
    return rows_of_passes(point, passes, tables=launch.facts)


def measure_cached(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Measure rows ``prefetch``, ``forward`` and ``backward`` of one TBE with a cache.

    Every repeat looks up a new batch, after batches that fill the cache several times: a ring of
    few batches would lie in the cache as a whole, and fetch nothing.
    """
    launch = Launch(point.params, timer.device)
    cached_rows = point.params["cache_load_factor"] * sum(table[0] for table in launch.facts)
    warming = WARM_CACHE * cached_rows / max(sum(table[4] for table in launch.facts), 1.0)

    def prefetch(_: int, arguments: Any) -> Any:
        launch.tbe.prefetch(*arguments[:2])
        return arguments

    stages: tuple[Callable[[int, Any], Any], ...] = (
        lambda _, __: launch.draw()[0],
        prefetch,
        lambda _, arguments: launch.tbe(*arguments),
        lambda _, output: launch.backward(output),
    )
    for i in range(min(math.ceil(warming), MOST_WARMING)):
        value: Any = None
        for stage in stages:
            value = stage(i, value)
    return rows_of_passes(point, sample_stages(timer, stages, seconds)[1:], tables=launch.facts)


def measure_model_lookup(
    model: Workload, point: Point, timer: Timer, seconds: float
) -> list[Measurement]:
    """Measure rows ``forward`` and ``backward`` of one table for the samples of all ranks.

    The facts are those of a lookup with one table, and the other inputs of the kernel model.
    """
    table = model.tables[model.keys.index(point.params["table"])]
    samples = point.params["batch_size"] * point.params["ranks"]
    only = replace(model, tables=(table,), batch_size=samples)
    ring = [batch.sparse[table.module] for batch in batch_ring(only, size=BATCHES)]
    inputs = []
    for sparse in ring:
        moved = sparse.to(timer.device)
        weights = moved.weights_or_none()
        inputs.append((moved.values(), moved.offsets(), *(() if weights is None else (weights,))))
    # TorchRec makes its SGD the exact one
    plain_sgd = table.optimizer == Optimizer.SGD
    optimizer = str(Optimizer.EXACT_SGD if plain_sgd else table.optimizer)
    tbe = make_tbe(
        [(table.num_embeddings, table.embedding_dim)],
        timer.device,
        optimizer,
        table.data_type,
        feature_table_map=[0] * len(table.features),
        pooling_mode=PoolingMode[table.pooling.upper()],
    )
    gradients = [torch.full_like(tbe(*arguments), 1e-3) for arguments in inputs]

    def forward(repeat: int) -> Any:
        i = repeat % BATCHES
        return tbe(*inputs[i]), gradients[i]

    spent = sample_passes(timer, forward, lambda output: output[0].backward(output[1]), seconds)
    ids = float(np.mean([sparse.values().numel() for sparse in ring]))
    distinct = float(np.mean([len(np.unique(sparse.values().numpy())) for sparse in ring]))
    bags = samples * len(table.features)
    return rows_of_passes(
        point,
        spent,
        tables=[[table.num_embeddings, table.embedding_dim, bags, ids, distinct]],
        dtype=table.data_type,
        optimizer=optimizer,
        weighted=table.weighted,
        pooled=table.is_pooled,
        mean=table.pooling == "mean",
    )


class Launch:
    """The TBE of a point, and batches for it."""

    def __init__(self, params: dict[str, Any], device: str) -> None:
        self.params, self.device = params, device
        self.generator = torch.Generator(device).manual_seed(0)
        self._draws = [_ids_of(table, self.generator) for table in params["tables"]]
        options: dict[str, Any] = {}
        if "cache_load_factor" in params:
            options["cache_load_factor"] = params["cache_load_factor"]
        self.pooled = params.get("pooled", True)
        if not self.pooled:
            options["pooling_mode"] = PoolingMode.NONE
        self.tbe = make_tbe(
            [(table["rows"], table["dim"]) for table in params["tables"]],
            device,
            params.get("optimizer", OPTIMIZER),
            params.get("dtype", DTYPE),
            params.get("kernel", ComputeKernel.FUSED),
            **options,
        )

    @cached_property
    def gradient(self) -> Any:
        """Gradient of the pooled outputs of all tables, or of a row for each id, of one width."""
        rows, width = self.params["batch"], sum(table["dim"] for table in self.params["tables"])
        if not self.pooled:
            rows = max(len(arguments[0]) for arguments, _ in self.ring)
            width = self.params["tables"][0]["dim"]
        return torch.full((rows, width), 1e-3, device=self.device)

    def backward(self, output: Any) -> Any:
        """Run the backward of an output, with the step of its optimizer or to a dense gradient."""
        if self.params.get("kernel") == ComputeKernel.DENSE:
            # not .backward(), which would add to the gradient of the sample before
            return torch.autograd.grad(output, self.tbe.weights, self.gradient)
        return output.backward(self.gradient if self.pooled else self.gradient[: len(output)])

    @cached_property
    def ring(self) -> list[tuple[tuple[Any, ...], list[tuple[int, int]]]]:
        """`BATCHES` batches of `draw`."""
        return [self.draw() for _ in range(BATCHES)]

    @cached_property
    def facts(self) -> list[list[float]]:
        """Rows, dim, bags, and ids and distinct rows counted in the ring, ``[tables, 5]``."""
        means = np.mean([counts for _, counts in self.ring], axis=0)
        return [
            [table["rows"], table["dim"], self.params["batch"], *mean.tolist()]
            for table, mean in zip(self.params["tables"], means, strict=True)
        ]

    def draw(self) -> tuple[tuple[Any, ...], list[tuple[int, int]]]:
        """Draw one more batch.

        Returns:
            Ids, offsets and, if ids are weighted, weights; and ids and distinct rows of each table.
        """
        drawn = [draw(self.params["batch"]) for draw in self._draws]
        ids = torch.cat([ids for ids, _ in drawn])
        offsets = torch.cat([ids.new_zeros(1), torch.cat([n for _, n in drawn]).cumsum(0)])
        weights = (torch.full_like(ids, 0.5, dtype=torch.float32),)
        return (
            (ids, offsets, *(weights if self.params.get("weighted", False) else ())),
            [(ids.numel(), int(torch.unique(ids).numel())) for ids, _ in drawn],
        )


def _ids_of(params: dict[str, Any], generator: Any) -> Callable[[int], tuple[Any, Any]]:
    """Return a function that draws ids and lengths of a number of bags of a table.

    Each bag has floor or ceil of the pooling factor.
    """
    device, rows = generator.device, params["rows"]
    least = int(params["pooling"])
    if params["alpha"] > 0:
        ranks = torch.arange(1, rows + 1, dtype=torch.float64, device=device)
        upto = (ranks ** -params["alpha"]).cumsum(0)
        # the same popular rows in every batch, spread over the table
        place = torch.randperm(
            rows, generator=torch.Generator(device).manual_seed(rows), device=device
        )

    def draw(bags: int) -> tuple[Any, Any]:
        more = torch.rand(bags, generator=generator, device=device)
        lengths = least + (more < params["pooling"] - least).long()
        count = int(lengths.sum())
        if params["alpha"] == 0:
            return torch.randint(rows, (count,), generator=generator, device=device), lengths
        at = torch.rand(count, generator=generator, device=device, dtype=torch.float64)
        return place[torch.searchsorted(upto, at * upto[-1]).clamp(max=rows - 1)], lengths

    return draw


def make_tbe(
    shapes: list[tuple[int, int]],
    device: str,
    optimizer: str,
    dtype: str = DTYPE,
    kernel: str = ComputeKernel.FUSED,
    **options: Any,
) -> Any:
    """Make a TBE of tables with these rows and widths.

    Args:
        options: further arguments of FBGEMM's class.
    """
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
        **options,
    )
    # unwritten pages all map to one page of zeros, which is cheap to read
    for weights in tbe.split_embedding_weights():
        weights.fill_(0.01)
    return tbe


TORCH_DTYPES = {"fp32": "float32", "tf32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def measure_gemm(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Measure ``[m, k] @ [k, n]``, or ``count`` of them, laid out as in forward or backward."""
    p = point.params
    batch = (p["count"],) if "count" in p else ()
    dtype, layout = getattr(torch, TORCH_DTYPES[p.get("dtype", "fp32")]), p["layout"]

    def operand(rows: int, columns: int, turned: bool) -> Any:
        shape = (columns, rows) if turned else (rows, columns)
        values = torch.randn((*batch, *shape), device=timer.device).to(dtype)
        return values.transpose(-1, -2) if turned else values

    a = operand(p["m"], p["k"], layout == "tn")
    b = operand(p["k"], p["n"], layout == "nt")
    multiply = torch.bmm if batch else torch.mm
    # tf32: a GPU's lower precision of fp32 products, on request
    torch.set_float32_matmul_precision("high" if p.get("dtype") == "tf32" else "highest")
    samples = timer.samples(lambda: multiply(a, b), seconds)
    torch.set_float32_matmul_precision("highest")
    return [row_of_samples(point, samples)]


def measure_interaction(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Measure the dot products of all pairs: the batched product alone, or the whole layer."""
    p = point.params
    batch, vectors, dim = p["batch"], p["vectors"], p["dim"]
    stacked = torch.ones(batch, vectors, dim, device=timer.device, requires_grad=True)
    single = [
        torch.ones(batch, dim, device=timer.device, requires_grad=True) for _ in range(vectors)
    ]
    width = dim + vectors * (vectors - 1) // 2
    dot = Dot(vectors, torch.device(timer.device), "index", width)
    forward, inputs = {
        "bmm": (lambda: torch.bmm(stacked, stacked.transpose(1, 2)), [stacked]),
        "dot": (lambda: dot(single), single),
    }[p["op"]]
    return rows_of_passes(point, sample_gradients(timer, forward, inputs, seconds))


def measure_attention(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Measure `scaled_dot_product_attention` with a causal mask, as over a history."""
    p = point.params
    shape = (p["batch"], p["heads"], p["length"], p["width"])
    inputs = [torch.full(shape, 0.1, device=timer.device, requires_grad=True) for _ in range(3)]
    future = torch.full((p["length"], p["length"]), float("-inf"), device=timer.device).triu(1)

    def forward() -> Any:
        return functional.scaled_dot_product_attention(*inputs, attn_mask=future)

    return rows_of_passes(point, sample_gradients(timer, forward, inputs, seconds))


def measure_elementwise(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Measure a memory-bound kernel; its fact is the bytes read and written."""
    size = point.params["bytes"]
    x = torch.ones(size // 4, device=timer.device)
    y = torch.ones_like(x)
    halves = list(x.split((size // 8, size // 4 - size // 8)))
    calls: dict[str, tuple[int, Callable[[], Any]]] = {
        "clone": (2, x.clone),
        "relu": (2, lambda: torch.relu(x)),
        "add": (3, lambda: torch.add(x, y)),
        "cat": (2, lambda: torch.cat(halves)),
    }
    passes, call = calls[point.params["op"]]
    return [row_of_samples(point, timer.samples(call, seconds), bytes_moved=passes * size)]


def measure_streaming(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Measure a kernel that reads memory once and writes next to nothing."""
    x = torch.ones(point.params["bytes"] // 4, device=timer.device)
    return [row_of_samples(point, timer.samples(x.sum, seconds))]


def measure_copy_h2d(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Measure a copy from page-locked host memory to the device."""
    there = torch.empty(point.params["bytes"] // 4, device=timer.device)
    here = torch.ones(there.shape, pin_memory=timer.device == "cuda")
    samples = timer.samples(lambda: there.copy_(here, non_blocking=True), seconds)
    return [row_of_samples(point, samples)]


def measure_jagged(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Measure the bucketizing of a KeyedJaggedTensor's ids for row-wise shards.

    Facts: features, bags, ids, and the bytes of one pass over them.
    """
    p = point.params
    tables = tuple(
        Table(f"t{i}", JAGGED_ROWS, FLOAT_BYTES, (Feature(f"f{i}", p["pooling"]),))
        for i in range(p["features"])
    )
    workload = Workload("jagged", p["batch"], tables, DenseArch(1, (1,), (1,)))
    sparse = synthetic_batch(workload).sparse[tables[0].module].to(timer.device)
    values, lengths = sparse.values(), sparse.lengths()
    blocks = torch.full((len(tables),), -(-JAGGED_ROWS // p["buckets"]), device=timer.device)

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

    facts = {
        "features": len(tables),
        "bags": lengths.numel(),
        "ids": values.numel(),
        "bytes": LONG_BYTES * (lengths.numel() + values.numel()),
    }
    return [row_of_samples(point, timer.samples(bucketize, seconds), **facts)]


def measure_pooled(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Measure concatenation or split of pooled embeddings; facts: pieces, and bytes of all."""
    dims, batch = point.params["dims"], point.params["batch"]
    whole = torch.ones(batch, sum(dims), device=timer.device, requires_grad=True)
    pieces = [torch.ones(batch, dim, device=timer.device, requires_grad=True) for dim in dims]
    forward, inputs = {
        "cat": (lambda: torch.cat(pieces, dim=1), pieces),
        "split": (lambda: torch.split(whole, dims, dim=1), [whole]),
    }[point.params["op"]]
    spent = sample_gradients(timer, forward, inputs, seconds)
    return rows_of_passes(point, spent, pieces=len(dims), bytes=FLOAT_BYTES * whole.numel())


def measure_function(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Measure an elementwise function and its gradient."""
    op, elements = point.params["op"], point.params["elements"]
    x = torch.linspace(-3.0, 3.0, elements, device=timer.device)
    x = x.view(-1, SOFTMAX_WIDTH).clone().requires_grad_()
    options = {"dim": -1} if op == "softmax" else {}
    call = getattr(functional, op)
    return rows_of_passes(point, sample_gradients(timer, lambda: call(x, **options), [x], seconds))


def measure_concatenation(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Measure the concatenation of matrices along their last dimension."""
    p = point.params
    pieces, rows, width = p["pieces"], p["rows"], p["width"]
    parts = {
        "whole": lambda: [torch.ones(rows, width, device=timer.device) for _ in range(pieces)],
        "turned": lambda: [torch.ones(width, rows, device=timer.device).t() for _ in range(pieces)],
        "sliced": lambda: torch.ones(rows, (pieces + 1) * width, device=timer.device).split(
            width, 1
        )[:pieces],
    }[p["form"]]()
    return [row_of_samples(point, timer.samples(lambda: torch.cat(parts, dim=1), seconds))]


OPS_PER_SAMPLE = 200
"""Small ops timed together: a single one is shorter than the clock can resolve."""
TRIPS_PER_SAMPLE = 20
CLOCK_BYTES, CLOCK_KERNELS = 4096, 40
"""Bytes of a tiny kernel, and its number of runs; see `measure_clock`."""
TINY_WIDTH, TINY_BATCH = 8, 8


def measure_host(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Measure the mean host time of one repeat in a loop.

    ``op``: a small op recorded for the backward, over a mix of five. ``op_on_host``: the same on
    host tensors, with the same framework code and no launch. ``round_trip``: an op and waiting
    until the device has done it. ``sync``: reading a value from an idle device.
    """
    loop = point.params["what"]
    device = "cpu" if loop == "op_on_host" else timer.device
    x = torch.ones(8, device=device, requires_grad=loop in ("op", "op_on_host"))

    def trips() -> None:
        for _ in range(TRIPS_PER_SAMPLE):
            torch.add(x, 1.0)
            timer.synchronize()

    def reads() -> None:
        for _ in range(TRIPS_PER_SAMPLE):
            x[0].item()

    calls: dict[str, tuple[int, Callable[[], object]]] = {
        "op": (OPS_PER_SAMPLE, lambda: _mix(x)),
        "op_on_host": (OPS_PER_SAMPLE, lambda: _mix(x)),
        "round_trip": (TRIPS_PER_SAMPLE, trips),
        "sync": (TRIPS_PER_SAMPLE, reads),
    }
    repeats, call = calls[loop]
    clock = timer if timer.device == "cpu" else HostTimer(timer)
    times = clock.samples(call, seconds).seconds
    facts: dict[str, Any] = {}
    if loop == "op" and timer.device == "cuda":
        facts |= {"device": _device(), "threads": torch.get_num_threads()}
    return [row_of_samples(point, Samples(tuple(t / repeats for t in times)), **facts)]


def measure_clock(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Measure a tiny kernel between two events; its fact is the kernel's own time.

    Events add some 2.4 us on an H200 (a kernel of 1.2 us measures 3.6). In a step the next kernel
    starts meanwhile.
    """
    kind = timer.device.upper()
    x = torch.ones(CLOCK_BYTES // 4, device=timer.device)
    samples = timer.samples(lambda: torch.add(x, 1.0), seconds)
    with profile(activities=[getattr(ProfilerActivity, kind)]) as recorded:
        for _ in range(CLOCK_KERNELS):
            torch.add(x, 1.0)
        timer.synchronize()
    # launches by the host are recorded as well
    kernels = [
        event.time_range.elapsed_us()
        for event in recorded.events()
        if event.device_type == getattr(DeviceType, kind)
    ]
    facts = {"kernel_us": round(statistics.median(kernels), 3)} if kernels else {}
    return [row_of_samples(point, samples, **facts)]


def _device() -> dict[str, float]:
    """Return the properties of the current GPU; ``l2_mib`` is 0 if unknown."""
    about = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "sms": about.multi_processor_count,
        "memory_gib": round(about.total_memory / GIB, 2),
        "l2_mib": getattr(about, "L2_cache_size", 0) / MIB,
    }


class HostTimer(CpuTimer):
    """Timer of the host's work while the device runs behind it."""

    def __init__(self, device: Timer) -> None:
        super().__init__(flush_bytes=0)
        self._device = device

    def flush(self) -> None:
        """Let the device finish, so that no full queue stops the host."""
        self._device.synchronize()


def _mix(x: Any) -> None:
    for _ in range(OPS_PER_SAMPLE // MIX):
        y = torch.add(x, 1.0)
        z = torch.cat((y, y))
        a, _ = torch.split(z, 8)
        torch.relu(a)
        a.view(2, 4)


def measure_layers(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Measure forward and backward of linear layers with ReLU that compute next to nothing."""
    layers: list[Any] = []
    for _ in range(point.params["depth"]):
        layers += [torch.nn.Linear(TINY_WIDTH, TINY_WIDTH), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers).to(timer.device)
    x = torch.ones(TINY_BATCH, TINY_WIDTH, device=timer.device, requires_grad=True)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        model(x).sum().backward()

    return [row_of_samples(point, timer.samples(step, seconds))]


def measure_optimizer(point: Point, timer: Timer, seconds: float) -> list[Measurement]:
    """Measure an optimizer step of square layers; facts: number of tensors and of elements."""
    width = point.params["width"]
    shapes = [(width, width), (width,)] * point.params["layers"]
    weights = [torch.nn.Parameter(torch.ones(shape, device=timer.device)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.full_like(weight, 1e-3)
    optimizer = DENSE_OPTIMIZERS[point.params["op"]](weights, lr=0.01)
    elements = sum(weight.numel() for weight in weights)
    samples = timer.samples(optimizer.step, seconds)
    return [row_of_samples(point, samples, tensors=len(weights), elements=elements)]


Measure = Callable[[Point, Timer, float], list[Measurement]]
"""Times a point for about so many seconds, and returns a row for each of its parts."""
MEASURES: dict[str, Measure] = {
    "lookup": measure_lookup,
    "lookup_variant": measure_lookup,
    "lookup_dense": measure_lookup,
    "lookup_cached": measure_cached,
    "lookup_unpooled": measure_lookup,
    "gemm": measure_gemm,
    "product": measure_gemm,
    "interaction": measure_interaction,
    "attention": measure_attention,
    "elementwise": measure_elementwise,
    "streaming": measure_streaming,
    "copy_h2d": measure_copy_h2d,
    "jagged": measure_jagged,
    "pooled": measure_pooled,
    "function": measure_function,
    "concatenation": measure_concatenation,
    "clock": measure_clock,
    "host": measure_host,
    "layers": measure_layers,
    "optimizer": measure_optimizer,
}
"""Measurements of the families by name, but for tables of a model."""
SHORT = 0.25
"""Time of other points over that of a lookup, whose every sample is long."""
GPU_SECONDS = 0.4
"""Most seconds of a lookup on a GPU: a dozen samples agree there within 2 %."""


def measure_alone(
    points: Sequence[Point],
    device: torch.device,
    settings: CalibrationSettings,
    lasts: Callable[[float], bool],
) -> Iterator[Measurement]:
    """Measure kernels point by point; a point that fails yields the row of its failure.

    Args:
        lasts: tells if less than a share of the time is over.
    """
    size, measures = settings.size, MEASURES
    if settings.model is not None:
        measures = {**MEASURES, "model_lookup": partial(measure_model_lookup, settings.model)}
    timer = timer_of(device.type)
    # the first lookups of a process take twice as long as all later ones: none of them counts
    measure_lookup(lookup_points(1)[0], timer, size.seconds)
    for point in points:
        if not lasts(1.0):
            return
        longest = size.seconds if device.type == "cpu" else min(size.seconds, GPU_SECONDS)
        seconds = longest * (1.0 if "lookup" in point.family else SHORT)
        try:
            yield from measures[point.family](point, timer, seconds)
        except Exception as error:
            # raises on a device that an error has broken, where nothing more can be measured
            timer.synchronize()
            yield row_of_failure(point, error)
        if device.type == "cuda":
            # free the tables of the last point; a reference cycle may hold some of them
            gc.collect()
            torch.cuda.empty_cache()
