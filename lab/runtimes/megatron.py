"""Megatron's software on a profile: fitted constants, kept with the rows behind them.

`predictor/hardware/runtimes/megatron.yaml` holds them; ``python -m lab fit megatron`` fits them.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from predictor import units
from predictor.cost.collectives import Collectives
from predictor.cost.elementwise import memory_ms
from predictor.cost.gemm import batched_ms
from predictor.errors import InputError
from predictor.hardware.loader import load_runtime
from predictor.hardware.schema import HardwareProfile
from predictor.iteration.graph import COMPUTE, Graph
from predictor.iteration.timeline import simulate_once
from predictor.model.topology import Topology

Configuration = tuple[int, ...]
"""Configuration of a measured row: its integer columns, in the file's order."""


@dataclass(frozen=True)
class MegatronRuntime:
    """Constants of the software; kernel times are those of the profile unless named here.

    Args:
        kernel_us: host time to launch one kernel.
        eager_factor: factor on it where each kernel is its own PyTorch op.
        elementwise_factor: kernel times of dropout, layer norm, GELU, bias and residual over the
            profile's; Megatron's fused softmax runs at the profile's.
        loss_factor: kernel times of the softmax over the vocabulary over the profile's.
        misaligned_factor: time of a multiplication for each halving of the widest aligned load,
            from 16 bytes down (where a dimension is not a multiple of eight halves).
        send_gb_s: rate at which stages hand over hidden states.
    """

    kernel_us: float
    eager_factor: float
    elementwise_factor: float
    loss_factor: float
    misaligned_factor: float
    send_gb_s: float


CONSTANTS = tuple(field.name for field in fields(MegatronRuntime))


@dataclass(frozen=True)
class FittedRuntime:
    """Shipped runtime, its hardware profile, and the rows that it was fitted on."""

    runtime: MegatronRuntime
    hardware: str
    rows: frozenset[Configuration]


@cache
def load_megatron() -> FittedRuntime:
    constants: dict[str, Any] = load_runtime("megatron")
    runtime = MegatronRuntime(**{name: float(constants["constants"][name]) for name in CONSTANTS})
    rows = frozenset(tuple(int(v) for v in row) for row in constants["fit_rows"])
    return FittedRuntime(runtime, str(constants["hardware"]), rows)


HALF_BYTES = 2
FUSED_ROWS = 4
"""Megatron's fused softmax runs if micro-batch times heads of a GPU is a multiple of this."""


@dataclass(frozen=True)
class GptTraining:
    """Model and its parallelism; the GPUs are ``tensor * data * pipeline``.

    Args:
        vocabulary: rows of the embedding, also those of the logits.
        micro_batch: samples that pass the pipeline together.
        global_batch: samples of an iteration over all replicas.
        recompute: repeat the forward pass of a layer before its backward pass.

    Raises:
        InputError: sizes do not divide evenly.
    """

    hidden: int
    heads: int
    layers: int
    sequence: int
    vocabulary: int
    micro_batch: int
    global_batch: int
    tensor: int
    data: int
    pipeline: int
    recompute: bool = False

    def __post_init__(self) -> None:
        share = self.data * self.micro_batch
        for quantity, whole, parts in (
            ("hidden size", self.hidden, self.heads),
            ("attention heads", self.heads, self.tensor),
            ("layers", self.layers, self.pipeline),
            ("global batch", self.global_batch, share),
        ):
            if whole % parts:
                raise InputError(f"{quantity} {whole} is not a multiple of {parts}")

    @property
    def gpus(self) -> int:
        return self.tensor * self.data * self.pipeline

    @property
    def micro_batches(self) -> int:
        return self.global_batch // (self.data * self.micro_batch)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one micro-batch's hidden states, which stages and tensor ranks exchange."""
        return HALF_BYTES * self.micro_batch * self.sequence * self.hidden

    @property
    def local_vocabulary(self) -> int:
        """Rows of the embedding on one GPU."""
        return self.vocabulary // self.tensor

    @property
    def layer_parameters(self) -> int:
        """Weights of one layer on one GPU."""
        return 12 * self.hidden**2 // self.tensor

    @property
    def embedding_parameters(self) -> int:
        """Weights of word and position embedding on one GPU."""
        return (self.local_vocabulary + self.sequence) * self.hidden


@dataclass(frozen=True)
class Kernel:
    """One kernel, or one collective.

    Args:
        kind: ``gemm``, ``softmax`` (Megatron's own kernels), ``elementwise``, ``loss`` (softmax
            over the vocabulary and its gradient) or ``all_reduce``.
        bytes_moved: read and written, or the buffer of the all-reduce.
        shape: m, n and k of a multiplication.
        count: multiplications of that shape in one kernel.
        eager: own PyTorch op, with its call in Python and its node in the backward; other kernels
            share theirs.
    """

    name: str
    kind: str
    bytes_moved: float = 0.0
    shape: tuple[int, ...] = (0, 0, 0)
    count: int = 1
    eager: bool = False


@cache
def kernel_rows() -> tuple[dict[str, str], ...]:
    """Read the kernels of a micro-batch in launch order, those of a layer once for all layers.

    For a multiplication, `size` is m, n and k, and `times` the number in one kernel. For other
    kernels, `size` is the bytes moved, in multiples of the names of `_sizes`, and `times` the
    number of kernels in sequence. A dropout reads and writes, with half a byte of mask an element
    of two; a layer norm's weight gradients are partial sums, one for 64 bytes of the states; the
    gradient of an embedding in bags of one sorts the ids in ten kernels. Without fused softmax
    PyTorch's kernels run in fp32 (``eager``).
    """
    path = Path(__file__).with_name("megatron_kernels.csv")
    with path.open(encoding="utf-8", newline="") as file:
        return tuple(csv.DictReader(file))


SEGMENTS = tuple(dict.fromkeys(row["segment"] for row in kernel_rows()))
"""Segments of a micro-batch; those of a layer run once for each layer of a stage."""


@cache
def segment_kernels(model: GptTraining) -> dict[str, tuple[Kernel, ...]]:
    """Return segment -> its kernels in launch order."""
    sizes = _sizes(model)
    fused = sizes["heads"] % FUSED_ROWS == 0
    absent = {"eager" if fused else "softmax", *(["all_reduce"] if model.tensor == 1 else [])}
    kernels_of: dict[str, list[Kernel]] = {name: [] for name in SEGMENTS}
    for row in kernel_rows():
        if row["kind"] not in absent:
            kernels_of[row["segment"]] += _kernels(row, sizes)
    if model.recompute:
        kernels_of["layer_backward"][:0] = kernels_of["layer_forward"]
    return {name: tuple(kernels) for name, kernels in kernels_of.items()}


def _kernels(row: dict[str, str], sizes: dict[str, float]) -> list[Kernel]:
    name, kind, times = row["name"], row["kind"], row["times"] or "1"
    if kind == "gemm":
        shape = tuple(int(sizes[name_of_size]) for name_of_size in row["size"].split())
        return [Kernel(name, kind, shape=shape, count=int(sizes.get(times, 1)))]
    terms = (term.split() for term in row["size"].split(" + "))
    size = sum(float(factor) * sizes[name_of_size] for factor, name_of_size in terms)
    eager = kind == "eager"
    return [Kernel(name, "elementwise" if eager else kind, size, eager=eager)] * int(times)


def _sizes(model: GptTraining) -> dict[str, float]:
    """Return the sizes of kernels by name; ``heads`` counts all samples on one GPU."""
    hidden, split, sequence = model.hidden, model.tensor, model.sequence
    tokens, heads = model.micro_batch * sequence, model.micro_batch * model.heads // split
    vocabulary = model.local_vocabulary
    return {
        "tokens": tokens,
        "sequence": sequence,
        "hidden": hidden,
        "head": hidden // model.heads,
        "heads": heads,
        "qkv": 3 * hidden // split,
        "inner": 4 * hidden // split,
        "out": hidden // split,
        "vocabulary": vocabulary,
        "ids": 8 * tokens,
        "states": model.hidden_bytes,
        "states/t": model.hidden_bytes / split,
        "scores": HALF_BYTES * heads * sequence**2,
        "logits": HALF_BYTES * tokens * vocabulary,
        "table": HALF_BYTES * vocabulary * hidden,
    }


Array = NDArray[np.float64]
Pass = tuple[int, bool, int]
"""Stage, true for a backward pass, micro-batch."""


def schedule(stages: int, micro_batches: int) -> list[Pass]:
    """Return all passes of the 1F1B schedule, each after those it waits for."""
    orders = [list(_stage_order(s, stages, micro_batches)) for s in range(stages)]
    done = np.zeros((stages, 2), dtype=np.int64)
    position = [0] * stages
    passes: list[Pass] = []
    while len(passes) < 2 * stages * micro_batches:
        for stage, order in enumerate(orders):
            while position[stage] < len(order):
                backward, index = order[position[stage]]
                source = stage + 1 if backward else stage - 1
                if 0 <= source < stages and done[source, int(backward)] <= index:
                    break
                passes.append((stage, backward, index))
                done[stage, int(backward)] += 1
                position[stage] += 1
    return passes


def _stage_order(stage: int, stages: int, micro_batches: int) -> Iterator[tuple[bool, int]]:
    warm_up = min(stages - 1 - stage, micro_batches)
    for index in range(warm_up):
        yield False, index
    for index in range(warm_up, micro_batches):
        yield False, index
        yield True, index - warm_up
    for index in range(micro_batches - warm_up, micro_batches):
        yield True, index


def pipeline_ms(
    forward_ms: ArrayLike, backward_ms: ArrayLike, send_ms: ArrayLike, micro_batches: int
) -> Array:
    """Return the time until the last stage is done, ``[...]``.

    Args:
        forward_ms, backward_ms: times of one micro-batch, ``[..., stages]``.
        send_ms: time from one stage to the next, either way, ``[...]``.
    """
    forward, backward = np.asarray(forward_ms, float), np.asarray(backward_ms, float)
    stages = forward.shape[-1]
    if stages == 1:
        return np.asarray(micro_batches * (forward + backward)[..., 0])
    send = np.asarray(send_ms, dtype=np.float64)
    free = [np.zeros(forward.shape[:-1]) for _ in range(stages)]
    arrived: dict[Pass, Array] = {}
    for stage, is_backward, index in schedule(stages, micro_batches):
        step = -1 if is_backward else 1
        start = free[stage]
        source = (stage - step, is_backward, index)
        if source in arrived:
            start = np.maximum(start, arrived.pop(source))
        end = start + (backward if is_backward else forward)[..., stage]
        if 0 <= stage + step < stages:
            end = end + send
            arrived[stage, is_backward, index] = end
        free[stage] = end
    return np.asarray(np.max(free, axis=0))


DATA_TYPE = "fp16"
ALIGNED_ELEMENTS = 8
"""Two-byte elements in the widest load, 16 bytes: NVIDIA's Matrix Multiplication Background guide,
section on tensor core requirements."""
ADAM_BYTES = 22
"""Bytes moved per weight: fp16 weight and gradient read, weight written, two fp32 moments read and
written (apex multi_tensor_adam)."""
RESOURCES = {"gemm": "gemm", "all_reduce": "collectives.intra"}
"""Kind of kernel -> profile group of its time; other kinds stream through memory."""


class MegatronStep:
    """Predictor of iterations on one hardware; caches the costs that configurations share.

    Args:
        gpus_per_node: tensor-parallel ranks are neighbours, replicas come next, stages last
            (Megatron's order of ranks).
    """

    def __init__(
        self, hardware: HardwareProfile, runtime: MegatronRuntime, gpus_per_node: int = 8
    ) -> None:
        self.hardware = hardware
        self.gpus_per_node = gpus_per_node
        self._kernels: dict[Kernel, float] = {}
        self._joined: dict[tuple[int, int], Collectives] = {}
        self.use(runtime)

    def use(self, runtime: MegatronRuntime) -> None:
        self.runtime = runtime
        self._segments: dict[GptTraining, dict[str, float]] = {}

    def iteration_ms(self, models: Sequence[GptTraining]) -> Array:
        """Return the predicted times, ``[models]``."""
        shapes: dict[tuple[int, int], list[int]] = defaultdict(list)
        for index, model in enumerate(models):
            shapes[model.pipeline, model.micro_batches].append(index)
        times = np.zeros(len(models))
        for (_, micro_batches), members in shapes.items():
            stages = [self.stages_ms([models[i] for i in members], d) for d in (True, False)]
            send = [self.send_ms(models[i]) for i in members]
            times[members] = pipeline_ms(stages[0], stages[1], send, micro_batches)
        return times + [self.reduce_ms(model) + self.optimizer_ms(model) for model in models]

    def stages_ms(self, models: Iterable[GptTraining], forward: bool) -> Array:
        """Return the ms of each stage for one micro-batch one way, ``[models, stages]``."""
        way = "forward" if forward else "backward"
        stage_times = []
        for model in models:
            part = self.segments_ms(model)
            layers = model.layers // model.pipeline
            times = np.full(model.pipeline, layers * part[f"layer_{way}"])
            times[0] += part[f"embedding_{way}"]
            times[-1] += part[f"head_{way}"]
            stage_times.append(times)
        return np.stack(stage_times)

    def send_ms(self, model: GptTraining) -> float:
        """Return the ms to send hidden states to the next stage."""
        return model.hidden_bytes / units.gb_per_s(self.runtime.send_gb_s)

    def segments_ms(self, model: GptTraining) -> dict[str, float]:
        """Return segment -> ms of one micro-batch."""
        key = replace(model, layers=1, global_batch=model.micro_batch, data=1, pipeline=1)
        if key not in self._segments:
            self._segments[key] = {
                name: float(simulate_once(self.segment(name, kernels, model)).iteration_ms[0])
                for name, kernels in segment_kernels(key).items()
            }
        return self._segments[key]

    def shares(self, model: GptTraining) -> dict[str, float]:
        """Return resource of the profile -> its share of an iteration.

        The time of a segment beyond its kernels is waiting for the host.
        """
        times = self.segments_ms(model)
        layers = model.layers / model.pipeline
        time_of: dict[str, float] = defaultdict(float)
        for name, kernels in segment_kernels(model).items():
            passes = model.micro_batches * (layers if name.startswith("layer") else 1.0)
            waiting = times[name]
            for kernel in kernels:
                time = self.kernel_ms(kernel, model)
                resource = RESOURCES.get(kernel.kind, "elementwise").split(".")[0]
                time_of[resource] += passes * time
                waiting -= time
            time_of["overheads"] += passes * max(waiting, 0.0)
        sends = 2 * model.micro_batches * self.send_ms(model) if model.pipeline > 1 else 0.0
        time_of["collectives"] += self.reduce_ms(model) + sends
        time_of["elementwise"] += self.optimizer_ms(model)
        total = sum(time_of.values())
        return {resource: time / total for resource, time in time_of.items()}

    def segment(self, name: str, kernels: Iterable[Kernel], model: GptTraining) -> Graph:
        """Return the graph of a segment's kernels on one GPU, launched from idle."""
        graph = Graph(1, 1)
        for kernel in kernels:
            joins = kernel.kind == "all_reduce"
            factor = 0.0 if joins else self.runtime.eager_factor if kernel.eager else 1.0
            graph.add(
                kernel.name,
                phase=name,
                resource=RESOURCES.get(kernel.kind, "elementwise"),
                stream=COMPUTE,
                cost_ms=self.kernel_ms(kernel, model),
                host_ms=factor * units.us(self.runtime.kernel_us),
                blocks_host=joins,
            )
        return graph

    def kernel_ms(self, kernel: Kernel, model: GptTraining) -> float:
        """Return a kernel's ms; an all-reduce joins the tensor-parallel ranks of a replica."""
        if kernel.kind == "all_reduce":
            return self._all_reduce(model.tensor, self.gpus_per_node, kernel.bytes_moved)
        if kernel not in self._kernels:
            self._kernels[kernel] = self._profile_ms(kernel)
        time = self._kernels[kernel]
        if kernel.kind == "gemm":
            return time * self.runtime.misaligned_factor ** misalignment(kernel.shape)
        if kernel.kind == "loss":
            return time * self.runtime.loss_factor
        return time * (self.runtime.elementwise_factor if kernel.kind == "elementwise" else 1.0)

    def _profile_ms(self, kernel: Kernel) -> float:
        if kernel.kind == "gemm":
            m, n, k = kernel.shape
            return batched_ms(self.hardware, kernel.count, m, n, k, DATA_TYPE)
        return float(memory_ms(self.hardware, kernel.bytes_moved))

    def reduce_ms(self, model: GptTraining) -> float:
        """Return the ms to reduce gradients over replicas, in half precision, after the passes.

        The two copies of the embedding's weights are not reduced with each other.
        """
        near = self.gpus_per_node // model.tensor
        return max(
            self._all_reduce(model.data, near, HALF_BYTES * weights)
            for weights in _stage_weights(model, copy_of_embedding=True)
        )

    def optimizer_ms(self, model: GptTraining) -> float:
        """Return the ms of Adam on the largest stage."""
        weights = max(_stage_weights(model, copy_of_embedding=False))
        return float(memory_ms(self.hardware, ADAM_BYTES * weights))

    def _all_reduce(self, ranks: int, near: int, size_bytes: float) -> float:
        """Return the ms of an all-reduce among ``ranks``, of which up to ``near`` share a node."""
        if ranks == 1:
            return 0.0
        local = math.gcd(ranks, max(near, 1))
        if (ranks, local) not in self._joined:
            caps = {"hbm_bytes": self.hardware.hbm_bytes, "ddr_bytes": self.hardware.ddr_bytes}
            topology = Topology.uniform(ranks, local, **caps)
            self._joined[ranks, local] = Collectives(self.hardware, topology)
        return float(self._joined[ranks, local].all_reduce(size_bytes))


def misalignment(shape: tuple[int, ...]) -> int:
    """Return the halvings from the widest load to the widest that fits m, n and k."""
    shared = math.gcd(ALIGNED_ELEMENTS, *shape)
    return round(math.log2(ALIGNED_ELEMENTS / shared))


def _stage_weights(model: GptTraining, *, copy_of_embedding: bool) -> list[int]:
    """Return the weights of each stage on one GPU, optionally with the copied embedding."""
    layers = model.layers // model.pipeline
    weights = [layers * model.layer_parameters] * model.pipeline
    weights[0] += model.embedding_parameters
    if copy_of_embedding:
        weights[-1] += model.local_vocabulary * model.hidden
    return weights
