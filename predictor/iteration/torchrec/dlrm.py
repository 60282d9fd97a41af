"""Builds the graph of one training iteration from workload, topology and summed loads.

The order is that of TorchRec's train pipelines (train_pipelines.py):
`TrainPipelineBase`, `TrainPipelineSparseDist` (ids of the next batch travel while this one
computes) and `PrefetchTrainPipelineSparseDist` (UVM caches are filled one batch ahead, too).
The dense part is that of `predictor.cost.dense`: lookups are issued where their module is called,
and what first reads their outputs waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from predictor.cost.dense import Bucket, GradientReturn, LookupCall, Segment, TableUpdate
from predictor.cost.fixed_costs import FixedCosts
from predictor.cost.host_ops import HOST_OPS
from predictor.cost.loads import LookupGroup
from predictor.iteration.drawn_graph import draw_graph
from predictor.iteration.graph import COMPUTE, Dep, Graph
from predictor.iteration.torchrec.feature_processor import FeatureProcessors
from predictor.iteration.torchrec.gradient_sync import GradientBuckets
from predictor.iteration.torchrec.input_dist import InputDist
from predictor.iteration.torchrec.replica_sync import ReplicaSync, ScatteredCopies
from predictor.iteration.torchrec.sparse import Exchange, exchanges
from predictor.units import us

Array = NDArray[np.float64]
LookModuleUp = Callable[[Sequence[Exchange]], None]


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
        self.costs = costs
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
        self.sending = [e for e in self.exchanges if not e.is_local]
        self.input = InputDist(self.graph, costs)
        self.gradients = GradientBuckets(self.graph, costs)
        self.processors = FeatureProcessors(self.graph, costs)
        copies = self.workload.replica_groups if self.workload.training else None
        copied = topology.job is not None and copies is not None
        scattered = copies is not None and copies.fully_sharded
        given = costs, groups, loads, make_exchange
        self.sync = ReplicaSync(*given) if copied and not scattered else None
        self.copies = ScatteredCopies(*given) if copied and scattered else None
        self.scattered: dict[int, int] = {}
        self.modules: dict[str, list[Exchange]] = {
            name: [*found] for name, found in groupby(self.exchanges, key=lambda e: e.module)
        }
        self.segments = 0
        self.lookups: dict[int, int] = {}
        self.delivered: dict[str, list[int]] = {}
        self.arrived: dict[str, list[int]] = {}

    def build(self) -> Graph:
        """One iteration under the workload's train pipeline, with the errors of the costs."""
        pipelines = {
            "base": self._base,
            "sparse_dist": self._sparse_dist,
            "prefetch_sparse_dist": self._prefetch_sparse_dist,
        }
        pipelines[self.workload.train_pipeline]()
        if self.sync is not None:
            self._average_copies(self.sync)
        errors = self.costs.errors
        return self.graph if errors is None else draw_graph(self.graph, errors, self.costs.topology)

    # --- pipelines -----------------------------------------------------------------------------

    def _base(self) -> None:
        """Module by module, ids are exchanged and looked up; the next batch is copied late."""

        def look_up(module: Sequence[Exchange]) -> None:
            sending = [e for e in module if not e.is_local]
            announced = [(e, self.input.announce([e], "compute")) for e in sending]
            ids: dict[str, int] = {}
            for exchange, splits in announced:
                ids |= self.input.send([exchange], self.input.read([exchange], splits))
            self._lookups(module, self._recats(sending, "compute", ids))

        first = self._forward(look_up)
        self._backward()
        copy = self.input.copy()
        self.graph.wait(first, Dep(copy, lag=1))
        self._optimizer_step()

    def _sparse_dist(self) -> None:
        """The ids of the next batch travel while this one computes."""
        copy = self.input.copy()  # of the batch after the next
        splits = self.input.announce(self.sending, "data_dist", Dep(copy, lag=1))
        recats: dict[str, int] = {}

        def look_up(module: Sequence[Exchange]) -> None:
            found = self._recats([e for e in module if not e.is_local], "data_dist")
            self._lookups(module, found)
            recats.update(found)

        self.graph.wait(self._forward(look_up), Dep(copy, lag=2))
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
        first = self._forward(lambda module: self._lookups(module, {}))
        self.graph.wait(first, Dep(copy, lag=2))
        for module in self.modules.values():
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

    def _forward(self, look_up: LookModuleUp) -> int:
        """The dense forward with the lookups where their modules are called.

        Returns:
            The first operation that computes.
        """
        first = len(self.graph.ops)
        for step in self.dense.forward:
            if isinstance(step, LookupCall) and step.module in self.modules:
                look_up(self.modules[step.module])
            elif isinstance(step, Segment):
                if step.waits:
                    self._unpack(step.waits)
                self._segment(step, backward=False)
        ops = range(first, len(self.graph.ops))
        return next(i for i in ops if self.graph.ops[i].stream == COMPUTE)

    def _lookups(self, module: Sequence[Exchange], recats: Mapping[str, int]) -> None:
        """Fused lookups and output distribution of one module's exchanges."""
        for exchange in module:
            recat = recats.get(exchange.name)
            before = [] if recat is None else [Dep(recat)]
            before = self.processors.weigh(exchange, before, backward=False)
            for group in exchange.members:
                self.lookups[group] = self._lookup(exchange, group, before, backward=False)
                self._scatter(exchange, group)
            outputs = self._outputs(exchange, list(exchange.members), backward=False)
            self.delivered.setdefault(exchange.module, []).extend(outputs)

    def _lookup(
        self, exchange: Exchange, group: int, deps: Sequence[Dep], *, backward: bool
    ) -> int:
        kernels = 8 if backward else 6
        ops = HOST_OPS.lookup_backward if backward else HOST_OPS.lookup
        lookup_ms = exchange.backward_ms if backward else exchange.forward_ms
        return self.graph.add(
            f"{exchange.name} lookup{' backward' if backward else ''}",
            phase="embedding_backward" if backward else "embedding_forward",
            resource="embedding",
            stream=COMPUTE,
            cost_ms=lookup_ms(group) + exchange.pack_ms(group, backward=backward),
            host_ms=self.host_ms(ops, kernels=kernels),
            kernels=kernels,
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

    def _unpack(self, modules: Sequence[str]) -> None:
        """Wait for the outputs of modules and make them what the model reads."""
        found = [m for m in modules if m in self.modules]
        deps = [Dep(op) for module in found for op in self.delivered[module]]
        self._copies("unpack embeddings", found, deps, backward=False)

    def _copies(
        self, name: str, modules: Sequence[str], deps: Sequence[Dep], *, backward: bool
    ) -> int:
        """Copies of what a module's exchanges delivered, or of the gradient that they return."""
        spread = [self.processors.spread(module, backward=backward) for module in modules]
        return self.graph.add(
            name,
            phase="dense_backward" if backward else "dense_forward",
            resource="elementwise",
            stream=COMPUTE,
            cost_ms=sum((self._unpack_ms(m, backward=backward) for m in modules), np.zeros(1))
            + sum(ms for ms, _ in spread),
            host_ms=self.host_ms(HOST_OPS.concat * len(modules) / len(self.modules), kernels=1)
            + sum(ms for _, ms in spread),
            deps=deps,
        )

    def _unpack_ms(self, module: str, *, backward: bool) -> Array:
        """Copies of a module's outputs, or gradients, ``[plans, 1]``."""
        found = self.modules[module]
        used = np.sum([e.active for e in found], axis=0)
        return np.asarray(sum(e.unpack_ms(used > 1, backward=backward) for e in found))

    def _segment(self, segment: Segment, *, backward: bool) -> int:
        self.segments += 1
        return self.graph.add(
            f"dense {self.segments} ({segment.name}){' backward' if backward else ''}",
            phase="dense_backward" if backward else "dense_forward",
            resource=segment.resource,
            stream=COMPUTE,
            cost_ms=segment.cost_ms,
            host_ms=segment.host_ms,
            kernels=segment.kernels,
        )

    # --- backward ------------------------------------------------------------------------------

    def _backward(self) -> None:
        """In the order of autograd: what was recorded last runs first."""
        if not self.workload.training:
            return
        for step in self.dense.backward:
            if isinstance(step, Segment):
                self._segment(step, backward=True)
            elif isinstance(step, Bucket):
                self.gradients.dense(step.bytes)
            elif step.module in self.modules:
                module = self.modules[step.module][::-1]
                if isinstance(step, GradientReturn):
                    self._return_gradients(step.module, module)
                elif isinstance(step, TableUpdate):
                    self._update_tables(module)

    def _return_gradients(self, name: str, module: Sequence[Exchange]) -> None:
        split = self._copies("pack gradients", [name], [], backward=True)
        for exchange in module:
            sent = self._outputs(exchange, [split], backward=True)
            self.arrived[exchange.name] = sent or [split]

    def _update_tables(self, module: Sequence[Exchange]) -> None:
        for exchange in module:
            after = [Dep(i) for i in self.arrived[exchange.name]]
            groups = reversed(exchange.members)
            done = [self._update(exchange, g, after) for g in groups]
            self.processors.weigh(exchange, [Dep(op) for op in done], backward=True)
            if exchange.is_replicated:
                self.gradients.tables(exchange, done)

    def _update(self, exchange: Exchange, group: int, after: Sequence[Dep]) -> int:
        """The backward of one launch, behind the gathering of its weights where copies have parts.

        A rank meets its copies alone, which are as late as it is.
        """
        if self.copies is not None and group in self.copies:
            self.graph.add(
                f"{exchange.name} gather copies",
                phase="replica_sync",
                resource="collectives",
                stream=COMPUTE,
                cost_ms=self.copies.gather_ms(group),
                host_ms=self.host_ms(HOST_OPS.gradient_sync, kernels=1, collectives=1),
                deps=[*after, Dep(self.scattered[group])],
                active=exchange.group_active(group),
            )
        return self._lookup(exchange, group, after, backward=True)

    def _scatter(self, exchange: Exchange, group: int) -> None:
        """The weights of one launch are averaged behind its forward, a part on each copy."""
        if self.copies is None or group not in self.copies:
            return
        self.scattered[group] = self.graph.add(
            f"{exchange.name} scatter copies",
            phase="replica_sync",
            resource="collectives",
            stream="copies",
            cost_ms=self.copies.scatter_ms(group),
            host_ms=self.host_ms(HOST_OPS.gradient_sync, kernels=1, collectives=1),
            deps=[Dep(self.lookups[group])],
            active=exchange.group_active(group),
        )

    # --- optimizer -----------------------------------------------------------------------------

    def _optimizer_step(self) -> None:
        """Dense parameters, and data-parallel tables as a whole: their gradient is dense."""
        if not self.workload.training:
            return
        step = self.dense.optimizer
        step_ms = np.asarray(step.cost_ms)
        for exchange in self.exchanges:
            if exchange.is_replicated:
                step_ms = step_ms + exchange.optimizer_ms(self.costs.optimizer_ms)
        self.graph.add(
            "optimizer step",
            phase="optimizer",
            resource="elementwise",
            stream=COMPUTE,
            cost_ms=step_ms,
            host_ms=us(self.hardware.overheads.iteration_us)
            + self.costs.step_host_ms(self.dense.parameters, step.kernels),
            kernels=step.kernels,
            deps=[Dep(i) for i in self.gradients.ops],
        )

    def _average_copies(self, sync: ReplicaSync) -> None:
        """The mean share of a step: a rank meets its copies alone, which are as late as it is."""
        if not sync.collectives:
            return
        ops, count = HOST_OPS.gradient_sync * sync.collectives, sync.collectives
        self.graph.add(
            "average copies of tables",
            phase="replica_sync",
            resource="collectives",
            stream=COMPUTE,
            cost_ms=sync.cost_ms(),
            host_ms=self.host_ms(ops, kernels=count, collectives=count) / sync.steps,
            kernels=count,
            active=sync.active,
        )
