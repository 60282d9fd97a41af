"""Builds the graph of one DLRM training iteration from workload, topology and summed loads.

The order is that of TorchRec's train pipelines (train_pipelines.py):
`TrainPipelineBase`, `TrainPipelineSparseDist` (ids of the next batch travel while this one
computes) and `PrefetchTrainPipelineSparseDist` (UVM caches are filled one batch ahead, too).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from predictor.cost.dense import Layer
from predictor.cost.elementwise import columns_ms
from predictor.cost.fixed_costs import FixedCosts
from predictor.cost.loads import LookupGroup
from predictor.iteration.graph import Dep, Graph
from predictor.iteration.torchrec.gradient_sync import GradientBuckets
from predictor.iteration.torchrec.host_ops import HOST_OPS
from predictor.iteration.torchrec.input_dist import InputDist
from predictor.iteration.torchrec.sparse import OUTPUT_BYTES, Exchange, exchanges
from predictor.units import us

Array = NDArray[np.float64]


class DlrmBuilder:
    """Adds the operations of one iteration to a graph, stage by stage.

    Args:
        loads: ``[plans, groups, ranks, columns]`` of `predictor.cost.loads`.
        groups: what the second axis of the loads stands for.
        make_exchange: `Exchange`, or a subclass with other cost models.
    """

    def __init__(
        self,
        costs: FixedCosts,
        groups: Sequence[LookupGroup],
        loads: Array,
        make_exchange: type[Exchange] = Exchange,
    ) -> None:
        self.workload = costs.workload
        self.hardware = costs.hardware
        self.dense = costs.dense
        self.host_ms = costs.host_ms
        self.layer_host_ms = costs.layer_host_ms
        self.exchanges = exchanges(costs, groups, loads, make_exchange)
        topology, hardware = costs.topology, costs.hardware
        inline = {"host", "compute", "copy", "data_dist"} if hardware.inline else {"host"}
        self.graph = Graph(
            topology.world_size,
            topology.intra_group_size,
            frozenset(inline),
            us(hardware.overheads.launch_latency_us),
        )
        self.sending = [e for e in self.exchanges if not e.is_local]
        self.input = InputDist(self.graph, costs)
        self.gradients = GradientBuckets(self.graph, costs)
        self.lookups: dict[int, int] = {}
        self.delivered: list[int] = []

    def build(self) -> Graph:
        """One iteration under the workload's train pipeline."""
        pipelines = {
            "base": self._base,
            "sparse_dist": self._sparse_dist,
            "prefetch_sparse_dist": self._prefetch_sparse_dist,
        }
        pipelines[self.workload.train_pipeline]()
        return self.graph

    # --- pipelines -----------------------------------------------------------------------------

    def _base(self) -> None:
        """Module by module, ids are exchanged and looked up; the next batch is copied late."""
        first = self._bottom()
        for module in self._modules():
            sending = [e for e in module if not e.is_local]
            announced = [(e, self.input.announce([e], "compute")) for e in sending]
            ids: dict[str, int] = {}
            for exchange, splits in announced:
                ids |= self.input.send([exchange], self.input.read([exchange], splits))
            self._lookups(module, self._recats(sending, "compute", ids))
        self._interaction_and_top()
        self._backward()
        copy = self.input.copy()
        self.graph.wait(first, Dep(copy, lag=1))
        self._optimizer_step()

    def _sparse_dist(self) -> None:
        """The ids of the next batch travel while this one computes."""
        copy = self.input.copy()  # of the batch after the next
        splits = self.input.announce(self.sending, "data_dist", Dep(copy, lag=1))
        self._bottom(Dep(copy, lag=2))
        recats: dict[str, int] = {}
        for module in self._modules():
            found = self._recats([e for e in module if not e.is_local], "data_dist")
            self._lookups(module, found)
            recats |= found
        self._interaction_and_top()
        ids = self.input.send(self.sending, self.input.read(self.sending, splits))
        for name, op in ids.items():
            self.graph.wait(recats[name], Dep(op, lag=1))
        self._backward()
        self._optimizer_step()

    def _prefetch_sparse_dist(self) -> None:
        """The ids of the next batch travel, and its rows enter the caches, one batch ahead."""
        copy = self.input.copy()  # of the batch after the next
        read = self.input.read(self.sending)
        ids = self.input.send(self.sending, read)
        first = self._bottom(Dep(copy, lag=2))
        for module in self._modules():
            self._lookups(module, {})
        self._interaction_and_top()
        for module in self._modules():
            recats = self._recats([e for e in module if not e.is_local], "data_dist", ids)
            fetched = self._prefetches(module, recats)
            # the compute stream waits for all of the prefetch stream before the batch starts
            ahead = [*recats.values(), *fetched]
            self.graph.wait(first, *(Dep(op, lag=1) for op in ahead))
        self._backward()
        self._optimizer_step()
        splits = self.input.announce(self.sending, "data_dist", Dep(copy))
        for host, announced in zip(read, splits, strict=True):
            self.graph.wait(host.op, replace(announced, lag=1))

    def _modules(self) -> list[list[Exchange]]:
        """The exchanges of each module, in order."""
        return [[*found] for _, found in groupby(self.exchanges, key=lambda e: e.module)]

    def _recats(
        self, sending: Sequence[Exchange], stream: str, ids: Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """Exchange name -> reordering of its received ids."""
        sent = {e.name: [Dep(ids[e.name])] if ids else [] for e in sending}
        return {e.name: self.input.recat(e, stream, sent[e.name]) for e in sending}

    def _prefetches(self, module: Sequence[Exchange], recats: Mapping[str, int]) -> Iterator[int]:
        """Fetch the next batch's rows into the UVM caches."""
        for exchange in module:
            for group in sorted(exchange.prefetched):
                yield self.graph.add(
                    f"{exchange.name} prefetch",
                    phase="prefetch",
                    resource="embedding",
                    stream="prefetch",
                    cost_ms=exchange.prefetch_ms(group),
                    host_ms=self.host_ms(HOST_OPS.lookup, kernels=6),
                    kernels=6,
                    deps=[Dep(op) for op in recats.values()],
                    active=exchange.group_active(group),
                )

    # --- forward -------------------------------------------------------------------------------

    def _bottom(self, *deps: Dep) -> int:
        """The bottom MLP; returns its first operation."""
        first = len(self.graph.ops)
        self._layers(self.dense.bottom, *deps)
        return first

    def _lookups(self, module: Sequence[Exchange], recats: Mapping[str, int]) -> None:
        """Fused lookups and output distribution of one module's exchanges."""
        for exchange in module:
            recat = recats.get(exchange.name)
            before = [] if recat is None else [Dep(recat)]
            for group in exchange.members:
                self.lookups[group] = self._lookup(exchange, group, before)
            self.delivered += self._outputs(exchange, list(exchange.members), backward=False)

    def _interaction_and_top(self) -> None:
        """From the delivered embeddings to the loss."""
        self._concat("concat embeddings", [Dep(i) for i in self.delivered])
        self._layers([*self.dense.interaction, *self.dense.top, self.dense.loss])

    def _lookup(self, exchange: Exchange, group: int, deps: Sequence[Dep]) -> int:
        return self.graph.add(
            f"{exchange.name} lookup",
            phase="embedding_forward",
            resource="embedding",
            stream="compute",
            cost_ms=exchange.forward_ms(group) + exchange.pack_ms(group, backward=False),
            host_ms=self.host_ms(HOST_OPS.lookup, kernels=6),
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
                        HOST_OPS.output_backward if backward else HOST_OPS.output,
                        kernels=1,
                        collectives=1,
                    ),
                    deps=deps,
                    scope=transfer.scope,
                    active=exchange.active,
                )
            ]
            deps = [Dep(last[0])]
        return last

    def _concat(self, name: str, deps: Sequence[Dep]) -> int:
        """Outputs of all exchanges, pooled, side by side (or their gradient split again)."""
        backward = name.endswith("backward")
        elements = 2 * self.dense.sparse_width + self.dense.sequence_width
        elements += self.workload.dlrm.copies[backward]
        moved = elements * self.workload.batch_size * OUTPUT_BYTES
        return self.graph.add(
            name,
            phase="dense_backward" if backward else "dense_forward",
            resource="elementwise",
            stream="compute",
            cost_ms=columns_ms(self.hardware, moved) + self._unpack_ms(backward=backward),
            host_ms=self.host_ms(HOST_OPS.concat, kernels=2),
            kernels=2,
            deps=deps,
        )

    def _unpack_ms(self, *, backward: bool) -> Array:
        """Copies of all exchanges' outputs, or gradients, ``[plans, 1]``."""
        found = np.zeros(1)
        for module in self._modules():
            used = np.sum([e.active for e in module], axis=0)
            found = found + sum(e.unpack_ms(used > 1, backward=backward) for e in module)
        return found

    def _layers(self, layers: Sequence[Layer], *deps: Dep) -> None:
        for layer in layers:
            self.graph.add(
                layer.name,
                phase="dense_forward",
                resource="gemm",
                stream="compute",
                cost_ms=layer.forward_ms,
                host_ms=self._layer_host_ms(layer.forward_kernels),
                kernels=layer.forward_kernels,
                deps=deps,
            )

    def _layer_host_ms(self, kernels: int) -> float:
        return self.layer_host_ms(HOST_OPS.layer_per_kernel * kernels, kernels)

    # --- backward ------------------------------------------------------------------------------

    def _backward(self) -> None:
        """Autograd runs the last created node first: top MLP, embeddings, then the bottom MLP."""
        if not self.workload.training:
            return
        self._layers_backward([*self.dense.top, self.dense.loss])
        self._layers_backward(self.dense.interaction)
        concat = self._concat("concat embeddings backward", [])
        arrived = {
            exchange.name: self._outputs(exchange, [concat], backward=True)
            for exchange in reversed(self.exchanges)
        }
        for exchange in reversed(self.exchanges):
            after = [Dep(i) for i in arrived[exchange.name]] or [Dep(concat)]
            done = [self._lookup_backward(exchange, g, after) for g in reversed(exchange.members)]
            if exchange.is_replicated:
                self.gradients.tables(exchange, done)
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

    def _lookup_backward(self, exchange: Exchange, group: int, deps: Sequence[Dep]) -> int:
        return self.graph.add(
            f"{exchange.name} lookup backward",
            phase="embedding_backward",
            resource="embedding",
            stream="compute",
            cost_ms=exchange.backward_ms(group) + exchange.pack_ms(group, backward=True),
            host_ms=self.host_ms(HOST_OPS.lookup_backward, kernels=8),
            kernels=8,
            deps=deps,
            active=exchange.group_active(group),
        )

    # --- optimizer -----------------------------------------------------------------------------

    def _optimizer_step(self) -> None:
        """Dense parameters, and data-parallel tables as a whole: their gradient is dense."""
        if not self.workload.training:
            return
        layers = [*self.dense.bottom, *self.dense.interaction, *self.dense.top]
        step_ms = self.dense.optimizer_ms(float(sum(p.parameters for p in layers)))
        for exchange in self.exchanges:
            if exchange.is_replicated:
                step_ms = step_ms + exchange.optimizer_ms(self.dense.optimizer_ms)
        self.graph.add(
            "optimizer step",
            phase="optimizer",
            resource="elementwise",
            stream="compute",
            cost_ms=step_ms,
            host_ms=us(self.hardware.overheads.iteration_us)
            + self.layer_host_ms(
                HOST_OPS.step + HOST_OPS.step_per_layer * len(layers), kernels=6 * len(layers)
            ),
            kernels=max(1, 6 * len(layers)),
            deps=[Dep(i) for i in self.gradients.ops],
        )
