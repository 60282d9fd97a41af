"""Iteration time of a GPT under Megatron: kernels, collectives, pipeline, optimizer.

One segment (a layer forward, a layer backward, embedding, logits and loss) is a graph of kernels on
one GPU, run by the timeline from idle: the host launches a kernel every ``kernel_us``, the device
runs them in order, and the host waits for every all-reduce among the tensor-parallel ranks. So a
segment lasts as long as its launches or its kernels, whichever is behind. Stages add up segments;
the schedule puts stages together; then gradients are reduced over the replicas and stepped.

Tensor-parallel ranks and replicas are alike, so one GPU per stage is simulated.

Why: docs/decisions/0018.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lab.runtimes.megatron.kernels import HALF_BYTES, GptTraining, Kernel, segment_kernels
from lab.runtimes.megatron.pipeline_schedule import pipeline_ms
from lab.runtimes.megatron.runtime import MegatronRuntime
from predictor import units
from predictor.cost.collectives import Collectives
from predictor.cost.elementwise import memory_ms
from predictor.cost.gemm import batched_ms
from predictor.hardware.schema import HardwareProfile
from predictor.iteration.graph import COMPUTE, Graph
from predictor.iteration.timeline import simulate_once
from predictor.model.topology import Topology

Array = NDArray[np.float64]

DATA_TYPE = "fp16"
ALIGNED_ELEMENTS = 8
"""Two-byte elements in the widest load, 16 bytes: NVIDIA's Matrix Multiplication Background guide,
section on tensor core requirements."""
ADAM_BYTES = 22
"""Bytes moved per weight: fp16 weight and gradient read, weight written, two fp32 moments read and
written (apex multi_tensor_adam)."""
RESOURCES = {"gemm": "gemm", "all_reduce": "collectives.intra"}
"""Kind of kernel -> profile group that its time comes from; others stream through memory."""


class MegatronStep:
    """Predicts iterations on given hardware; costs that configurations share are computed once.

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
        """Predict with other constants."""
        self.runtime = runtime
        self._segments: dict[GptTraining, dict[str, float]] = {}

    def iteration_ms(self, models: Sequence[GptTraining]) -> Array:
        """Predicted times, ``[models]``."""
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
        """Time of each stage for one micro-batch in one direction, ``[models, stages]``."""
        way = "forward" if forward else "backward"
        found = []
        for model in models:
            part = self.segments_ms(model)
            layers = model.layers // model.pipeline
            times = np.full(model.pipeline, layers * part[f"layer_{way}"])
            times[0] += part[f"embedding_{way}"]
            times[-1] += part[f"head_{way}"]
            found.append(times)
        return np.stack(found)

    def send_ms(self, model: GptTraining) -> float:
        """From one stage to the next."""
        return model.hidden_bytes / units.gb_per_s(self.runtime.send_gb_s)

    def segments_ms(self, model: GptTraining) -> dict[str, float]:
        """Segment -> time of one micro-batch."""
        key = replace(model, layers=1, global_batch=model.micro_batch, data=1, pipeline=1)
        if key not in self._segments:
            self._segments[key] = {
                name: float(simulate_once(self.segment(name, kernels, model)).iteration_ms[0])
                for name, kernels in segment_kernels(key).items()
            }
        return self._segments[key]

    def shares(self, model: GptTraining) -> dict[str, float]:
        """Resource of the profile -> its share of an iteration.

        Within a segment the device waits for the host in what its kernels leave.
        """
        times = self.segments_ms(model)
        layers = model.layers / model.pipeline
        found: dict[str, float] = defaultdict(float)
        for name, kernels in segment_kernels(model).items():
            passes = model.micro_batches * (layers if name.startswith("layer") else 1.0)
            left = times[name]
            for kernel in kernels:
                joins = kernel.kind == "all_reduce"
                time = self.tensor_ms(model, kernel) if joins else self.kernel_ms(kernel)
                resource = RESOURCES.get(kernel.kind, "elementwise").split(".")[0]
                found[resource] += passes * time
                left -= time
            found["overheads"] += passes * max(left, 0.0)
        sends = 2 * model.micro_batches * self.send_ms(model) if model.pipeline > 1 else 0.0
        found["collectives"] += self.reduce_ms(model) + sends
        found["elementwise"] += self.optimizer_ms(model)
        total = sum(found.values())
        return {resource: time / total for resource, time in found.items()}

    def segment(self, name: str, kernels: Iterable[Kernel], model: GptTraining) -> Graph:
        """The kernels of a segment on one GPU, launched from idle."""
        graph = Graph(1, 1)
        for kernel in kernels:
            joins = kernel.kind == "all_reduce"
            graph.add(
                kernel.name,
                phase=name,
                resource=RESOURCES.get(kernel.kind, "elementwise"),
                stream=COMPUTE,
                cost_ms=self.tensor_ms(model, kernel) if joins else self.kernel_ms(kernel),
                host_ms=0.0 if joins else self.launch_ms(kernel),
                blocks_host=joins,
            )
        return graph

    def launch_ms(self, kernel: Kernel) -> float:
        """Time of the host for one kernel."""
        factor = self.runtime.eager_factor if kernel.eager else 1.0
        return factor * units.us(self.runtime.kernel_us)

    def kernel_ms(self, kernel: Kernel) -> float:
        """Time of one kernel on the device."""
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
            return batched_ms(self.hardware, kernel.count, *kernel.shape, DATA_TYPE)
        return float(memory_ms(self.hardware, kernel.bytes_moved))

    def tensor_ms(self, model: GptTraining, kernel: Kernel) -> float:
        """An all-reduce among the tensor-parallel ranks of one replica."""
        return self._all_reduce(model.tensor, self.gpus_per_node, kernel.bytes_moved)

    def reduce_ms(self, model: GptTraining) -> float:
        """Gradients over the replicas, in half precision, once all micro-batches are done.

        The two copies of the embedding's weights are not reduced with each other.
        """
        near = self.gpus_per_node // model.tensor
        return max(
            self._all_reduce(model.data, near, HALF_BYTES * weights)
            for weights in _stage_weights(model, copy_of_embedding=True)
        )

    def optimizer_ms(self, model: GptTraining) -> float:
        """Adam on the largest stage."""
        weights = max(_stage_weights(model, copy_of_embedding=False))
        return float(memory_ms(self.hardware, ADAM_BYTES * weights))

    def _all_reduce(self, ranks: int, near: int, size_bytes: float) -> float:
        """Among ``ranks``, of which up to ``near`` lie on one node."""
        if ranks == 1:
            return 0.0
        local = math.gcd(ranks, max(near, 1))
        if (ranks, local) not in self._joined:
            caps = {"hbm_bytes": self.hardware.hbm_bytes, "ddr_bytes": self.hardware.ddr_bytes}
            topology = Topology.uniform(ranks, local, **caps)
            self._joined[ranks, local] = Collectives(self.hardware, topology)
        return float(self._joined[ranks, local].all_reduce(size_bytes))


def misalignment(shape: tuple[int, int, int]) -> int:
    """Halvings from the widest load to the widest that fits all of m, n and k."""
    shared = math.gcd(ALIGNED_ELEMENTS, *shape)
    return round(math.log2(ALIGNED_ELEMENTS / shared))


def _stage_weights(model: GptTraining, *, copy_of_embedding: bool) -> list[int]:
    """Weights of each stage on one GPU, with or without the last one's copy of the embedding."""
    layers = model.layers // model.pipeline
    weights = [layers * model.layer_parameters] * model.pipeline
    weights[0] += model.embedding_parameters
    if copy_of_embedding:
        weights[-1] += model.local_vocabulary * model.hidden
    return weights
