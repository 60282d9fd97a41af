"""The dense part of a DLRM as layers with their kernel times: MLPs, interaction, loss, optimizer.

The model file fixes the layers: Linear then ReLU, except for the last of the top MLP;
`dot`, `concat` or low-rank DCN v2 (Wang et al. 2021, eq. 5) between them; binary cross-entropy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from predictor import units
from predictor.cost.elementwise import memory_ms
from predictor.cost.gemm import batched_ms, gemm_ms
from predictor.hardware.loader import HardwareProfile
from predictor.model.workload import DATA_TYPE_BYTES, DcnV2, Workload

Array = NDArray[np.float64]

OPTIMIZER_PASSES = {"sgd": 3, "adagrad": 5, "adam": 7}
"""Reads and writes of a parameter-sized array per step: parameter, gradient, states."""


@dataclass(frozen=True)
class Activation:
    """Passes over a layer's output and the kernels that make them, forward and backward."""

    forward: int
    backward: int
    forward_kernels: int
    backward_kernels: int


ACTIVATIONS = {
    "relu": Activation(2, 3, 1, 1),
    # forward: normalise 2, sigmoid 2, multiply 3; backward: two multiplications 6, sigmoid 3,
    # normalisation 5 with its weights' sums, sum of the two gradients 3
    "swish_layer_norm": Activation(7, 17, 3, 6),
}


@dataclass(frozen=True)
class Layer:
    """One layer; times in ms, kernels are launches, parameters are elements."""

    name: str
    forward_ms: float
    backward_ms: float
    forward_kernels: int
    backward_kernels: int
    parameters: int


class DenseLayers:
    """Layers of a workload's dense part on given hardware, for the batch of one rank."""

    def __init__(self, workload: Workload, hardware: HardwareProfile) -> None:
        self.workload = workload
        self.hardware = hardware
        self.dense = workload.dlrm
        self.batch = workload.batch_size
        self.dtype = workload.dlrm.data_type
        self.element_bytes = DATA_TYPE_BYTES[self.dtype]

    @property
    def sparse_features(self) -> int:
        """Pooled outputs that the interaction sees."""
        return sum(len(t.features) for t in self.workload.tables)

    @property
    def sparse_width(self) -> int:
        """Elements per sample of all pooled outputs side by side."""
        return sum(len(t.features) * t.embedding_dim for t in self.workload.tables)

    @property
    def sequence_width(self) -> float:
        """Elements per sample of the outputs that are summed over the sample here (no pooling)."""
        tables = [t for t in self.workload.tables if not t.is_pooled]
        return sum(t.lookups_per_sample * t.embedding_dim for t in tables)

    @property
    def interaction_width(self) -> int:
        """Elements per sample of bottom output and pooled outputs side by side."""
        return sum(self.dense.bottom_mlp[-1:]) + self.sparse_width

    @property
    def top_input(self) -> int:
        """Elements per sample that enter the top MLP."""
        if self.dense.interaction == "dot":
            vectors = self.sparse_features + 1
            return self.dense.bottom_mlp[-1] + vectors * (vectors - 1) // 2
        return self.interaction_width

    @cached_property
    def bottom(self) -> list[Layer]:
        """The bottom MLP; its input needs no gradient."""
        return self._mlp("bottom", self.dense.in_features, self.dense.bottom_mlp, first_input=False)

    @cached_property
    def top(self) -> list[Layer]:
        """The top MLP, whose last layer has no ReLU; or layers of unknown wiring."""
        if self.dense.linears:
            layers = enumerate(self.dense.linears)
            relu = ACTIVATIONS["relu"]
            return [self._linear(f"linear.{i}", *shape, relu, True) for i, shape in layers]
        return self._mlp(
            "top", self.top_input, self.dense.top_mlp, first_input=True, bare_last=True
        )

    @cached_property
    def interaction(self) -> list[Layer]:
        """The layers between the MLPs."""
        kind = self.dense.interaction
        if isinstance(kind, DcnV2):
            return [self._cross(f"cross.{i}", kind) for i in range(kind.layers)]
        if kind == "dot":
            return [self._dot()]
        return []

    @cached_property
    def loss(self) -> Layer:
        """Sigmoid and binary cross-entropy over the batch."""
        forward = self._memory(4 * self.batch)
        return Layer("loss", 2 * forward, 2 * forward, 8, 4, 0)

    def optimizer_ms(self, parameters: float | Array) -> Array:
        """One dense optimizer step over ``parameters`` fp32 elements; 0 for none."""
        size = np.asarray(OPTIMIZER_PASSES[self.dense.optimizer] * 4 * np.asarray(parameters))
        return np.where(size > 0, memory_ms(self.hardware, size), 0.0)

    def _memory(self, elements: float) -> float:
        return float(memory_ms(self.hardware, elements * self.element_bytes))

    def _gemm(self, m: int, n: int, k: int) -> float:
        return gemm_ms(self.hardware, m, n, k, self.dtype)

    def _mlp(
        self,
        name: str,
        width: int,
        layers: tuple[int, ...],
        *,
        first_input: bool,
        bare_last: bool = False,
    ) -> list[Layer]:
        kind = self.dense.activation if bare_last else "relu"
        found = []
        for i, out in enumerate(layers):
            is_bare = bare_last and kind == "relu" and i == len(layers) - 1
            activation = None if is_bare else ACTIVATIONS[kind]
            found.append(self._linear(f"{name}.{i}", width, out, activation, first_input or i > 0))
            width = out
        return found

    def _linear(
        self, name: str, width: int, out: int, activation: Activation | None, input_gradient: bool
    ) -> Layer:
        batch = self.batch
        forward = self._gemm(batch, out, width)
        if not self.hardware.elementwise.fused_bias:
            forward += self._memory(2 * batch * out)
        # weight gradient, and the bias gradient as a reduction over the batch
        backward = self._gemm(out, width, batch) + self._memory(batch * out)
        if input_gradient:
            backward += self._gemm(batch, width, out)
        launched, launched_back = 1, 2 + input_gradient
        if activation is not None:
            forward += self._memory(activation.forward * batch * out)
            backward += self._memory(activation.backward * batch * out)
            launched += activation.forward_kernels
            launched_back += activation.backward_kernels
        return Layer(name, forward, backward, launched, launched_back, width * out + out)

    def _cross(self, name: str, dcn: DcnV2) -> Layer:
        """``x0 * (W (V x) + b) + x``: two GEMMs and a chain of elementwise kernels."""
        width, rank, batch = self.interaction_width, dcn.low_rank_dim, self.batch
        gemms = self._gemm(batch, rank, width) + self._gemm(batch, width, rank)
        weight_gradients = self._gemm(rank, width, batch) + self._gemm(width, rank, batch)
        chain = self._memory(6 * batch * width)
        return Layer(
            name,
            gemms + chain,
            gemms + weight_gradients + 2 * chain,
            4,
            9,
            2 * width * rank + width,
        )

    def _dot(self) -> Layer:
        """Batched ``X X^T`` of all vectors of a sample, lower triangle gathered."""
        vectors, dim = self.sparse_features + 1, self.dense.bottom_mlp[-1]
        batch = self.batch
        pairs = batch * vectors * (vectors - 1) / 2
        product = batched_ms(self.hardware, batch, vectors, vectors, dim, self.dtype)
        gather = self._memory(2 * pairs)
        gather += units.us(1e-3 * self.hardware.elementwise.gather_ns_per_element * pairs)
        each = batched_ms(self.hardware, batch, vectors, dim, vectors, self.dtype)
        # both operands are the stacked vectors: two gradients are written and then added
        backward = 2 * each + 2 * gather + self._memory(5 * batch * vectors * dim)
        return Layer("dot", product + gather, backward, 6, 16, 0)
