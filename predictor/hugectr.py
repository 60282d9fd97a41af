"""One iteration of HugeCTR as its MLPerf submissions ran it: captured in a CUDA graph.

After the public submissions (mlcommons/training_results_v3.1, NVIDIA, dlrm_dcnv2 implementation,
train.py and HugeCTR's sources): ids are distributed and sorted by the data reader one batch ahead;
embeddings travel in half precision, hierarchically where the plan is; layers are multiplications
with bias and ReLU fused into them; gradients of the dense part are reduced in half precision beside
the embedding backward; one graph launch replaces the host's work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from predictor.batch import BatchPredictor
from predictor.graph import Dep, Graph
from predictor.hardware import HardwareProfile
from predictor.kernels.elementwise import memory_ms
from predictor.kernels.gemm import gemm_ms
from predictor.loads import Load
from predictor.plan import ShardingPlan, TablePlan
from predictor.predict import candidate_of
from predictor.runtime import Runtime
from predictor.sparse import Exchange, exchanges
from predictor.timeline import simulate
from predictor.topology import Topology
from predictor.units import us
from predictor.workload import DATA_TYPE_BYTES, DcnV2, QComm, Workload

Array = NDArray[np.float64]

RESOURCES = {
    "embedding_forward": "embedding",
    "embedding_backward": "embedding",
    "dense_forward": "gemm",
    "dense_backward": "gemm",
    "host": "overheads",
}
"""Phase -> profile group that its time comes from; others stream through memory."""
MASTER_PASSES = 6
"""Adagrad on fp32 master weights: weight, state and gradient, read or written, and the fp16 copy
(two halves)."""


class HugeCtrBuilder:
    """Adds the operations of one HugeCTR iteration to a graph.

    Args:
        workload: in the model's own precision; the runtime replaces that of dense part and wire.
    """

    def __init__(
        self,
        workload: Workload,
        topology: Topology,
        hardware: HardwareProfile,
        plan: ShardingPlan,
        runtime: Runtime,
    ) -> None:
        self.dtype = runtime.dense_type or workload.dense.data_type
        self.workload = replace(
            workload,
            dense=replace(workload.dense, data_type=self.dtype),
            qcomm=QComm(self.dtype, self.dtype),
        )
        self.topology = topology
        self.hardware = hardware
        batch = BatchPredictor(self.workload, topology, hardware)
        candidate: tuple[TablePlan, ...] = candidate_of(self.workload, topology, plan)
        self.costs = batch.costs
        self.placed = batch.totals(candidate)[None]
        self.groups = batch.groups
        self.use(runtime)

    def use(self, runtime: Runtime) -> None:
        """Predict with the constants of a runtime of the same precision."""
        self.runtime = runtime
        self.loads, self.frequent = self.placed, 0.0
        if runtime.hybrid:
            share, self.frequent = frequent_rows(self.workload, self.topology.world_size)
            mean = self.placed.mean(axis=2, keepdims=True)
            self.loads = np.broadcast_to(mean, self.placed.shape).copy()
            self.loads[..., Load.OUTPUTS] *= 1 - share
        self.exchanges = exchanges(self.costs, self.groups, self.loads)

    def iteration_ms(self) -> float:
        """Predicted time of one iteration."""
        return float(simulate(self.build()).iteration_ms[0])

    def build(self) -> Graph:
        """Lookups, exchange, dense part forward and backward, exchange, updates."""
        self.graph = Graph(self.topology.world_size, self.topology.intra_group_size)
        self.parameters = 0
        self.lookups: list[int] = []
        bottom = self._layers(self._bottom(), "bottom")
        delivered = [op for e in self.exchanges for op in self._forward(e)]
        self._add("arrange embeddings", "dense_forward", self._arrange_ms(), [*delivered, bottom])
        self._add("dot", "dense_forward", self._dot_ms(), [])
        deep = [*self._interaction(), *self._top()]
        self._layers(deep, "dense")
        gradients = self._backward(deep)
        self._add("dot backward", "dense_backward", 2 * self._dot_ms(), [gradients])
        arrange = self._add("arrange gradients", "dense_backward", self._arrange_ms(), [])
        sent = {e.name: self._returned(e, arrange) for e in self.exchanges}
        last = self._backward(self._bottom())
        reduced = self._reduce(last)
        updated = [op for e in self.exchanges for op in self._update(e, sent[e.name])]
        step = self._add("optimizer step", "optimizer", self._step_ms(), [*reduced])
        end = self._add("end of graph", "host", us(self.runtime.step_us), [*updated, step])
        for first in (0, *self.lookups):
            self.graph.wait(first, Dep(end, lag=1))
        return self.graph

    # --- sparse --------------------------------------------------------------------------------

    def _forward(self, exchange: Exchange) -> list[int]:
        """Pooled lookups, then the way to the samples' ranks."""
        found = []
        for group in exchange.members:
            cost = self.runtime.lookup_factor * exchange.forward_ms(group)
            found.append(
                self._add(f"{exchange.name} lookup", "embedding_forward", cost, [], "embedding")
            )
        self.lookups += found
        return self._transfers(exchange, found, backward=False)

    def _returned(self, exchange: Exchange, after: int) -> list[int]:
        return self._transfers(exchange, [after], backward=True)

    def _transfers(self, exchange: Exchange, after: list[int], *, backward: bool) -> list[int]:
        if exchange.is_local:
            return after
        phase = "output_dist_backward" if backward else "output_dist_forward"
        for transfer in exchange.outputs(backward=backward):
            op = self.graph.add(
                transfer.name,
                phase=phase,
                resource="collectives",
                stream="comm",
                cost_ms=transfer.cost_ms,
                deps=[Dep(i) for i in after],
                scope=transfer.scope,
            )
            after = [op]
        return after

    def _update(self, exchange: Exchange, after: list[int]) -> list[int]:
        """Segmented gradients and the optimizer, on rows that the reader has sorted before."""
        found = []
        for group in exchange.members:
            cost = self._update_ms(exchange, group)
            found.append(self._add(f"{exchange.name} update", "embedding_backward", cost, after))
        return found

    def _update_ms(self, exchange: Exchange, group: int) -> Array:
        """Replicated tables are small: their gradients stream through, as do rows and state."""
        if not exchange.is_local:
            return self.runtime.update_factor * exchange.backward_ms(group)
        load = self.loads[:, group]
        width = DATA_TYPE_BYTES[self.dtype]
        size = width * load[..., Load.OUTPUTS] + 4.0 * MASTER_PASSES * load[..., Load.GRADIENTS]
        return memory_ms(self.hardware, size)

    def _reduce(self, after: int) -> list[int]:
        """Dense gradients and those of replicated tables: one all-reduce in half precision."""
        width = DATA_TYPE_BYTES[self.dtype]
        replicated = float(self.loads[..., Load.GRADIENTS].sum(axis=1).max())
        size = width * (self.parameters + replicated + self.frequent)
        cost = self.costs.collectives.all_reduce(np.float64(size), scope="world")
        if self.topology.world_size == 1:
            return [after]
        return [
            self.graph.add(
                "all-reduce gradients",
                phase="all_reduce",
                resource="collectives",
                stream="comm",
                cost_ms=np.asarray(cost),
                deps=[Dep(after)],
                scope="world",
            )
        ]

    # --- dense ---------------------------------------------------------------------------------

    def _bottom(self) -> list[tuple[int, int]]:
        dense = self.workload.dense
        return _widths(dense.in_features, dense.bottom_mlp)

    def _interaction(self) -> list[tuple[int, int]]:
        """Multiplications of the interaction as (inputs, outputs)."""
        dense, layers = self.workload.dense, self.costs.dense
        if isinstance(dense.interaction, DcnV2):
            width, rank = layers.interaction_width, dense.interaction.low_rank_dim
            return [(width, rank), (rank, width)] * dense.interaction.layers
        return []

    def _top(self) -> list[tuple[int, int]]:
        return _widths(self.costs.dense.top_input, self.workload.dense.top_mlp)

    def _layers(self, layers: Sequence[tuple[int, int]], name: str) -> int:
        op = -1
        for i, (inputs, outputs) in enumerate(layers):
            cost = self._gemm(self.workload.batch_size, outputs, inputs)
            op = self._add(f"{name}.{i}", "dense_forward", cost, [])
        return op

    def _backward(self, layers: Sequence[tuple[int, int]]) -> int:
        batch, op = self.workload.batch_size, -1
        for inputs, outputs in reversed(layers):
            cost = self._gemm(batch, inputs, outputs) + self._gemm(inputs, outputs, batch)
            op = self._add(f"backward {inputs}x{outputs}", "dense_backward", cost, [])
            self.parameters += inputs * outputs + outputs
        return op

    def _gemm(self, m: int, n: int, k: int) -> float:
        """One multiplication with what is fused into it."""
        time = gemm_ms(self.hardware, m, n, k, self.dtype) - us(self.hardware.gemm.floor_us)
        return self.runtime.gemm_factor * time

    def _arrange_ms(self) -> float:
        """Received embeddings into the layout of the interaction: read and written once."""
        width = DATA_TYPE_BYTES[self.dtype]
        size = 2 * width * self.workload.batch_size * self.costs.dense.interaction_width
        return float(memory_ms(self.hardware, size))

    def _dot_ms(self) -> float:
        """Pairwise products as one fused kernel: vectors in, products out."""
        if self.workload.dense.interaction != "dot":
            return 0.0
        elements = self.costs.dense.interaction_width + self.costs.dense.top_input
        size = DATA_TYPE_BYTES[self.dtype] * self.workload.batch_size * elements
        return float(memory_ms(self.hardware, size))

    def _step_ms(self) -> float:
        return float(memory_ms(self.hardware, 4.0 * MASTER_PASSES * self.parameters))

    def _add(
        self,
        name: str,
        phase: str,
        cost: Array | float,
        deps: Sequence[int],
        stream: str = "compute",
    ) -> int:
        return self.graph.add(
            name,
            phase=phase,
            resource=RESOURCES.get(phase, "elementwise"),
            stream=stream,
            cost_ms=us(self.runtime.graph_node_us) + np.asarray(cost),
            deps=[Dep(i) for i in deps],
        )


def frequent_rows(workload: Workload, ranks: int) -> tuple[float, float]:
    """Share of the lookups that rows on every rank serve, and the elements of those rows.

    An exchange moves every occurrence of a row there and back among ``ranks``; replicating the row
    moves it through an all-reduce instead, as many bytes as that of ``ranks`` occurrences. So rows
    that a batch holds that often are the frequent ones, HugeCTR's choice on one link.
    """
    samples = workload.batch_size * ranks
    served = lookups = elements = 0.0
    for table in workload.tables:
        for feature in table.features:
            bins = feature.distribution.bins(table.num_embeddings)
            draws = samples * feature.lookups_per_sample
            often = draws * bins.probs >= ranks
            served += draws * float((bins.counts * bins.probs)[often].sum())
            lookups += draws
            elements += float(bins.counts[often].sum()) * table.embedding_dim
    return served / lookups, elements


def _widths(inputs: int, layers: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip((inputs, *layers[:-1]), layers, strict=True))
