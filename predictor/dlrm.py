"""Builds the graph of one DLRM training iteration from workload, topology and summed loads.

The order is that in which TorchRec's train pipelines issue the work (train_pipelines.py):
`TrainPipelineBase`, `TrainPipelineSparseDist` (ids of the next batch travel while this one
computes) and `PrefetchTrainPipelineSparseDist` (UVM caches are filled one batch ahead, too).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from predictor.costs import Costs
from predictor.dense import Layer
from predictor.gradient_sync import GradientSync
from predictor.graph import Dep, Graph
from predictor.input_dist import InputDist
from predictor.kernels.elementwise import memory_ms
from predictor.loads import LookupGroup
from predictor.sparse import OUTPUT_BYTES, Exchange, exchanges
from predictor.units import us

Array = NDArray[np.float64]

# Framework ops on the host per stage, as equivalents of the profile's op_us: host time of the stage
# in the 8-rank TorchRec trace of facebookresearch/param (et_replay/tests/inputs/dlrm_kineto.tar.gz),
# 2 us per recorded event taken off for the profiler, launches apart, over 21 us (Lin et al., T1).
# They stand for TorchRec's code, not for hardware.
OPS_LOOKUP = 15
OPS_LOOKUP_BACKWARD = 11
OPS_OUTPUT = 8
OPS_OUTPUT_BACKWARD = 18
OPS_CONCAT = 13
OPS_PER_KERNEL = 1.5
"""Of dense layers, forward and backward."""
OPS_STEP = 6
OPS_STEP_LAYER = 5

PREFETCH_DEPTH = {"base": 0, "sparse_dist": 1, "prefetch_sparse_dist": 2}
"""How many iterations before its use a batch's ids travel."""


class DlrmBuilder:
    """Adds the operations of one iteration to a graph, stage by stage.

    Args:
        loads: ``[plans, groups, ranks, columns]`` of `predictor.loads`.
        groups: what the second axis of the loads stands for.
        make_exchange: `Exchange`, or one with other laws of cost.
    """

    def __init__(
        self,
        costs: Costs,
        groups: Sequence[LookupGroup],
        loads: Array,
        make_exchange: type[Exchange] = Exchange,
    ) -> None:
        self.workload = costs.workload
        self.hardware = costs.hardware
        self.dense = costs.dense
        self.host_ms = costs.host_ms
        self.exchanges = exchanges(costs, groups, loads, make_exchange)
        topology, hardware = costs.topology, costs.hardware
        inline = {"host", "compute", "copy", "data_dist"} if hardware.inline else {"host"}
        self.graph = Graph(
            topology.world_size,
            topology.intra_group_size,
            frozenset(inline),
            us(hardware.overheads.launch_latency_us),
        )
        self.depth = PREFETCH_DEPTH[self.workload.train_pipeline]
        distributed = [e for e in self.exchanges if not e.is_local]
        self.input = InputDist(self.graph, costs, distributed)
        self.gradients = GradientSync(self.graph, costs)

    def build(self) -> Graph:
        """One iteration under the workload's train pipeline."""
        copy = self.input.copy()
        if self.depth:
            splits = self.input.announce("data_dist", Dep(copy, lag=1))
            recats = self._forward(copy)
            prefetches = self._prefetch() if self.depth > 1 else []
            ids = self.input.send(splits)
            for name, recat in recats.items():
                self.graph.wait(recat, Dep(ids[name], lag=self.depth))
            for op, name in prefetches:
                self.graph.wait(op, Dep(ids[name], lag=self.depth - 1))
        else:
            self._forward(copy)
        self._backward()
        self._optimizer_step()
        return self.graph

    def _prefetch(self) -> list[tuple[int, str]]:
        """Fetch the next batch's rows into the UVM caches; the lookups wait for it (lag 1)."""
        found = []
        for exchange in self.exchanges:
            for group in exchange.members:
                cost = exchange.prefetch_ms(group)
                if not cost.any():
                    continue
                op = self.graph.add(
                    f"{exchange.name} prefetch",
                    phase="prefetch",
                    resource="embedding",
                    stream="prefetch",
                    cost_ms=cost,
                    host_ms=self.host_ms(OPS_LOOKUP, kernels=6),
                    active=exchange.group_active(group),
                )
                self.graph.wait(self.lookups[group], Dep(op, lag=1))
                if not exchange.is_local:
                    found.append((op, exchange.name))
        return found

    # --- forward -------------------------------------------------------------------------------

    def _forward(self, copy: int) -> dict[str, int]:
        """Bottom MLP to loss; returns exchange name -> recat op, which waits for the ids."""
        arrived = Dep(copy, lag=self.depth + 1)
        self.last_bottom = self._layers(self.dense.bottom, arrived)
        ids: dict[str, int] = {}
        if not self.depth:
            ids = self.input.send(self.input.announce("compute", arrived))
        recats: dict[str, int] = {}
        self.lookups: dict[int, int] = {}
        outputs = []
        for exchange in self.exchanges:
            before = [arrived]
            if not exchange.is_local:
                sent = [Dep(ids[exchange.name])] if ids else []
                stream = "data_dist" if self.depth else "compute"
                recats[exchange.name] = self.input.recat(exchange, stream, sent)
                before = [Dep(recats[exchange.name])]
            for group in exchange.members:
                self.lookups[group] = self._lookup(exchange, group, before)
            outputs += self._outputs(exchange, list(exchange.members), backward=False)
        concat = self._concat("concat embeddings", [Dep(i) for i in outputs])
        self._layers(self.dense.interaction, Dep(concat), Dep(self.last_bottom))
        self._layers([*self.dense.top, self.dense.loss])
        return recats

    def _lookup(self, exchange: Exchange, group: int, deps: Sequence[Dep]) -> int:
        return self.graph.add(
            f"{exchange.name} lookup",
            phase="embedding_forward",
            resource="embedding",
            stream="compute",
            cost_ms=exchange.forward_ms(group),
            host_ms=self.host_ms(OPS_LOOKUP, kernels=6),
            kernels=6,
            deps=deps,
            active=exchange.group_active(group),
        )

    def _outputs(self, exchange: Exchange, after: list[int], *, backward: bool) -> list[int]:
        """The output distribution of one exchange; returns the ops whose end delivers it."""
        if exchange.is_local:
            return [] if backward else [self.lookups[g] for g in after]
        deps = [Dep(i if backward else self.lookups[i]) for i in after]
        last: list[int] = []
        for transfer in exchange.outputs(backward=backward):
            last = [
                self.graph.add(
                    transfer.name + (" backward" if backward else ""),
                    phase="output_dist_backward" if backward else "output_dist_forward",
                    resource="collectives",
                    stream="comm",
                    cost_ms=transfer.cost_ms,
                    host_ms=self.host_ms(
                        OPS_OUTPUT_BACKWARD if backward else OPS_OUTPUT, kernels=1, collectives=1
                    ),
                    deps=deps,
                    scope=transfer.scope,
                    active=exchange.active,
                )
            ]
            deps = [Dep(last[0])]
        return last

    def _concat(self, name: str, deps: Sequence[Dep]) -> int:
        """Pooled outputs of all exchanges side by side (or their gradient split again)."""
        width = self.dense.sparse_width * self.workload.batch_size * OUTPUT_BYTES
        backward = name.endswith("backward")
        return self.graph.add(
            name,
            phase="dense_backward" if backward else "dense_forward",
            resource="elementwise",
            stream="compute",
            cost_ms=float(memory_ms(self.hardware, 2 * width)),
            host_ms=self.host_ms(OPS_CONCAT, kernels=2),
            kernels=2,
            deps=deps,
        )

    def _layers(self, layers: Sequence[Layer], *deps: Dep) -> int:
        last = -1
        for layer in layers:
            last = self.graph.add(
                layer.name,
                phase="dense_forward",
                resource="gemm",
                stream="compute",
                cost_ms=layer.forward_ms,
                host_ms=self._layer_host_ms(layer.forward_kernels),
                kernels=layer.forward_kernels,
                deps=deps,
            )
        return last

    def _layer_host_ms(self, kernels: int) -> float:
        return self.host_ms(OPS_PER_KERNEL * kernels, kernels=kernels)

    # --- backward ------------------------------------------------------------------------------

    def _backward(self) -> None:
        """Autograd runs the last created node first: top MLP, embeddings, then the bottom MLP."""
        self._layers_backward([*self.dense.top, self.dense.loss])
        self._layers_backward(self.dense.interaction)
        concat = self._concat("concat embeddings backward", [])
        arrived = {
            exchange.name: self._outputs(exchange, [concat], backward=True)
            for exchange in reversed(self.exchanges)
        }
        for exchange in reversed(self.exchanges):
            after = [Dep(i) for i in arrived[exchange.name]] or [Dep(concat)]
            for group in reversed(exchange.members):
                self._lookup_backward(exchange, group, after)
            if exchange.is_local:
                self.gradients.tables(exchange)
        self._layers_backward(self.dense.bottom)
        self.gradients.flush()

    def _layers_backward(self, layers: Sequence[Layer]) -> None:
        for layer in reversed(layers):
            self.graph.add(
                f"{layer.name} backward",
                phase="dense_backward",
                resource="gemm",
                stream="compute",
                cost_ms=layer.backward_ms,
                host_ms=self._layer_host_ms(layer.backward_kernels),
                kernels=layer.backward_kernels,
            )
            self.gradients.add(layer.parameters)

    def _lookup_backward(self, exchange: Exchange, group: int, deps: Sequence[Dep]) -> None:
        self.graph.add(
            f"{exchange.name} lookup backward",
            phase="embedding_backward",
            resource="embedding",
            stream="compute",
            cost_ms=exchange.backward_ms(group),
            host_ms=self.host_ms(OPS_LOOKUP_BACKWARD, kernels=8),
            kernels=8,
            deps=deps,
            active=exchange.group_active(group),
        )

    # --- optimizer -----------------------------------------------------------------------------

    def _optimizer_step(self) -> None:
        """Dense parameters, and data-parallel tables as a whole: their gradient is dense."""
        layers = [*self.dense.bottom, *self.dense.interaction, *self.dense.top]
        step_ms = self.dense.optimizer_ms(float(sum(p.parameters for p in layers)))
        for exchange in self.exchanges:
            if exchange.is_local:
                step_ms = step_ms + exchange.optimizer_ms(self.dense.optimizer_ms)
        self.graph.add(
            "optimizer step",
            phase="optimizer",
            resource="elementwise",
            stream="compute",
            cost_ms=step_ms,
            host_ms=self.host_ms(OPS_STEP + OPS_STEP_LAYER * len(layers), kernels=6 * len(layers)),
            kernels=6 * len(layers),
            deps=[Dep(i) for i in self.gradients.ops],
        )
