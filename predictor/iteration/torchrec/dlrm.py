"""Builds the graph of one training iteration from workload, topology and summed loads.

The order is that of TorchRec's train pipelines (train_pipelines.py; docs/model.md, chapter 11):
`TrainPipelineBase`, `TrainPipelineSparseDist`, `PrefetchTrainPipelineSparseDist` and
`TrainPipelineSemiSync`. The dense part is that of `predictor.cost.dense`: lookups are issued where
their module is called, and what first reads their outputs waits for them.

Copies of tables are averaged by `DMPCollection.sync` of TorchRec 1.7 to 1.9 behind the optimizer
step (torchrec/distributed/model_parallel.py; chapter 26), one collective after the other, each
waited for before the next, so nothing of the rank's compute overlaps with it. Under
``ShardingStrategy.FULLY_SHARDED`` each launch's weights are averaged behind its forward instead, by
a reduce-scatter on a stream of its own, and gathered before its backward. Tables under
``data_parallel`` are not part of it: their gradients are all-reduced over all ranks.

Weights that are stashed (`MemoryStashingManager` in torchrec/distributed/memory_stashing.py) are
copied to the host behind their lookup and back before its backward, which waits for them; states of
the dense optimizer behind its step, and back before the next one. Both restores are issued where
the backward begins; a script may choose another place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from predictor.cost.dense import Bucket, DenseSegment, GradientReturn, LookupCall, TableUpdate
from predictor.cost.elementwise import copy_h2d_ms
from predictor.cost.fixed_costs import HOST_OPS, FixedCosts
from predictor.cost.loads import Load
from predictor.cost.ops.position_weights import (
    OPS,
    PREPARE_BYTES,
    PREPARE_OPS,
    RANGE_BYTES,
    READ_BACK_BYTES,
    SPREAD_OPS,
    ids_ms,
    spread_ms,
)
from predictor.errors import InputError
from predictor.iteration.graph import (
    COMPUTE,
    PACK,
    UNPACK,
    Dep,
    Graph,
    Mask,
    draw_graph,
    learned_graph,
)
from predictor.iteration.torchrec.sparse import LENGTH_BYTES, CostModel, Exchange, Size, exchanges
from predictor.model.lookup_group import LookupGroup
from predictor.model.memory.peak import program_of
from predictor.model.plan import ROW_SPLITS
from predictor.model.workload import INDEX_BYTES
from predictor.units import us

Array = NDArray[np.float64]
LookModuleUp = Callable[[Sequence[Exchange]], None]


class OpKind(NamedTuple):
    """Kind of operation: its phase, the profile group that prices it, its stream and its scope."""

    phase: str
    resource: str
    stream: str
    scope: str | None = None


def _both(phase: str, resource: str, stream: str) -> dict[bool, OpKind]:
    """Map ``backward`` to the kinds of a phase: forward under False, backward under True."""
    ways = {False: "forward", True: "backward"}
    return {backward: OpKind(f"{phase}_{way}", resource, stream) for backward, way in ways.items()}


COPY_INPUT = OpKind("input_copy", "memory", "copy")
MOVE_IDS = OpKind("input_dist", "elementwise", COMPUTE)
SEND_IDS = OpKind("input_dist", "collectives", "comm", "world")
READ_SPLITS = OpKind("input_dist", "overheads", "host")
PREFETCH = OpKind("prefetch", "embedding", "prefetch")
LOOKUP = _both("embedding", "embedding", COMPUTE)
SEND_OUTPUTS = _both("output_dist", "collectives", "comm")
DENSE = _both("dense", "elementwise", COMPUTE)
ALL_REDUCE = OpKind("all_reduce", "collectives", "comm", "world")

OPTIMIZER = OpKind("optimizer", "elementwise", COMPUTE)
SYNC_COPIES = OpKind("replica_sync", "collectives", COMPUTE)
STASH = OpKind("stash", "memory", "stash")
RESTORE = OpKind("stash", "memory", "copy")
"""Restores run on the stream of the batches."""

Launch = tuple[float, int, int]
"""Framework ops on the host, kernels, collectives."""


class DlrmBuilder:
    """Builder that adds the operations of one iteration to a graph, stage by stage.

    Args:
        loads: ``[plans, groups, ranks, columns]`` of `predictor.cost.loads`.
        groups: the lookup groups of the second axis of the loads.
        make_exchange: `Exchange`, or a subclass with other cost models.
    """

    def __init__(
        self,
        costs: FixedCosts,
        groups: Sequence[LookupGroup],
        loads: Array,
        make_exchange: type[Exchange] = Exchange,
    ) -> None:
        self.workload, self.hardware = costs.workload, costs.hardware
        self.costs, self.dense = costs, costs.dense
        self.exchanges = exchanges(costs, groups, loads, make_exchange)
        topology, hardware = costs.topology, costs.hardware
        inline = {"host", COMPUTE, "copy", "data_dist"} if hardware.inline else {"host"}
        self.graph = Graph(
            topology.world_size,
            topology.intra_group_size,
            frozenset(inline),
            us(hardware.overheads.launch_latency_us),
        )
        self.sending = _sending(self.exchanges)
        self.gradients: list[int] = []
        copied = topology.job is not None and self.workload.training
        self.copies = self.workload.replica_groups if copied else None
        self.averaged, self.launches = self._copied_tables(groups, loads, make_exchange)
        self.scattered: dict[int, int] = {}
        # ranks on CPUs have nothing to stash
        stashed = [i for i, g in enumerate(groups) if g.stashed and hardware.device != "cpu"]
        self.stashed = {i: make_exchange(costs, groups, [i], loads, f"stash {i}") for i in stashed}
        self.stashes: dict[int, int] = {}
        self.restored: dict[int, int] = {}
        self.states: int | None = None
        self.state_bytes = 0
        if self.workload.stash_optimizer_state and hardware.device != "cpu":
            self.state_bytes = program_of(self.workload).state_bytes
        self.unpacked: list[tuple[int, list[str]]] = []
        self.modules: dict[str, list[Exchange]] = {
            name: [*of_module]
            for name, of_module in groupby(self.exchanges, key=lambda e: e.module)
        }
        self.segments = 0
        self.lookups: dict[int, int] = {}
        self.delivered: dict[str, list[int]] = {}
        self.arrived: dict[str, list[int]] = {}

    def build(self) -> Graph:
        """Build one iteration under the workload's train pipeline, with the errors of the costs."""
        pipelines = {
            "base": self._base,
            "sparse_dist": self._sparse_dist,
            "prefetch_sparse_dist": self._prefetch_sparse_dist,
            "semi_sync": self._semi_sync,
        }
        pipelines[self.workload.train_pipeline]()
        self._average_copies()
        errors, learned, graph = self.costs.errors, self.hardware.learned, self.graph
        if learned is not None:
            graph = learned_graph(graph, learned)
        return graph if errors is None else draw_graph(graph, errors, self.costs.topology)

    def _add(
        self,
        name: str,
        kind: OpKind,
        cost_ms: Array | float,
        launch: Launch = (0.0, 0, 0),
        deps: Sequence[Dep | int] = (),
        active: Mask | None = None,
        *,
        host_ms: float = 0.0,
        kernels: int = 1,
        waiting_ms: Array | None = None,
    ) -> int:
        """Append an operation and return its index.

        Args:
            host_ms: time on the host beside the launch.
            kernels: least number of kernels.
        """
        return self.graph.add(
            name,
            phase=kind.phase,
            resource=kind.resource,
            stream=kind.stream,
            cost_ms=cost_ms,
            host_ms=self.costs.host_ms(*launch) + host_ms,
            kernels=max(kernels, *launch[1:]),
            deps=deps,
            scope=kind.scope,
            active=active,
            waiting_ms=waiting_ms,
        )

    # --- pipelines -----------------------------------------------------------------------------

    def _base(self) -> None:
        """Exchange and look up ids module by module; copy the next batch late."""

        def look_up(module: Sequence[Exchange]) -> None:
            announced = [(e, self._announce([e], COMPUTE)) for e in _sending(module)]
            ids: dict[str, int] = {}
            if self.costs.topology.world_size == 1 and not self.hardware.inline:
                self._read_lengths()
            for exchange, splits in announced:
                ids |= self._send([exchange], self._read([exchange], splits))
            self._lookups(module, self._recats(module, COMPUTE, ids))

        first = self._forward(look_up)
        self._backward()
        copy = self._copy_input()
        self._wait(first, Dep(copy, lag=1))
        self._optimizer_step()

    def _sparse_dist(self) -> None:
        """Send the ids of the next batch while this one computes."""
        copy = self._copy_input()  # of the batch after the next
        splits = self._announce(self.sending, "data_dist", Dep(copy, lag=1))
        recats: dict[str, int] = {}

        def look_up(module: Sequence[Exchange]) -> None:
            of_module = self._recats(module, "data_dist")
            self._lookups(module, of_module)
            recats.update(of_module)

        self._wait(self._forward(look_up), Dep(copy, lag=2))
        ids = self._send(self.sending, self._read(self.sending, splits))
        for name, op in ids.items():
            self.graph.wait(recats[name], Dep(op, lag=1))
        self._backward()
        self._optimizer_step()

    def _prefetch_sparse_dist(self) -> None:
        """Send the ids of the next batch, and fetch its rows into the caches, one batch ahead."""
        copy = self._copy_input()  # of the batch after the next
        read = self._read(self.sending)
        ids = self._send(self.sending, read)
        first = self._forward(lambda module: self._lookups(module, {}))
        self._wait(first, Dep(copy, lag=2))
        for module in self.modules.values():
            recats = self._recats(module, "data_dist", ids)
            fetched = self._prefetches(module, recats)
            # the compute stream waits for all of the prefetch stream before the batch starts
            ahead = [*recats.values(), *fetched]
            self._wait(first, *(Dep(op, lag=1) for op in ahead))
        self._backward()
        self._optimizer_step()
        splits = self._announce(self.sending, "data_dist", Dep(copy))
        for host, announced in zip(read, splits, strict=True):
            self.graph.wait(host.op, replace(announced, lag=1))

    def _semi_sync(self) -> None:
        """Look up the next batch behind this one's forward.

        Its outputs, and the ids of the batch after it, travel beside the backward.
        """
        copy = self._copy_input()  # of the batch three on
        splits = self._announce(self.sending, "data_dist", Dep(copy, lag=1))
        self._wait(self._forward(lambda module: None), Dep(copy, lag=3))
        recats = self._recats(self.sending, "data_dist")
        for module in self.modules.values():
            self._lookups(module, recats)
        for unpack, modules in self.unpacked:
            outputs = (op for module in modules for op in self.delivered[module])
            self.graph.wait(unpack, *(Dep(op, lag=1) for op in outputs))
        ids = self._send(self.sending, self._read(self.sending, splits))
        for name, op in ids.items():
            self.graph.wait(recats[name], Dep(op, lag=1))
        self._backward()
        self._optimizer_step()

    # --- input distribution ---------------------------------------------------------------------

    def _copy_input(self) -> int:
        """Copy the batch from host to device memory, on its own stream, ahead of its use."""
        tables = self.workload.tables
        ids = sum(t.lookups_per_sample for t in tables)
        lengths = sum(f.num_poolings for t in tables for f in t.features)
        dense = self.workload.dense.in_features + 1
        weights = sum(t.lookups_per_sample for t in tables if t.weighted)
        per_sample = ids * INDEX_BYTES + (lengths + weights) * LENGTH_BYTES + dense * 4
        cost_ms = float(copy_h2d_ms(self.hardware, self.workload.batch_size * per_sample))
        return self._add("input copy", COPY_INPUT, cost_ms, (HOST_OPS["copy"], 4, 0))

    def _announce(self, exchanges: Sequence[Exchange], stream: str, *deps: Dep) -> list[Dep]:
        """Permute ids and announce their counts, in one all-to-all for all given exchanges.

        Pipelines fuse them in this way (`FusedKJTListSplitsAwaitable`).
        """
        permutes = [self._permute(exchange, stream, deps) for exchange in exchanges]
        if not exchanges:
            return []
        count = np.sum([e.active for e in exchanges], axis=0)[:, None]
        name, cost_ms = f"{_name(exchanges)} splits all-to-all", exchanges[0].splits_ms(count)
        launch, active = (HOST_OPS["splits"], 0, 1), _any_active(exchanges)
        return [Dep(self._add(name, SEND_IDS, cost_ms, launch, permutes, active))]

    def _permute(self, exchange: Exchange, stream: str, deps: Sequence[Dep]) -> int:
        """Permute ids; row splits also prepare the positions of a feature processor."""
        host_ms = 0.0
        if exchange.processed and exchange.sharding_type in ROW_SPLITS:
            host_ms = self.costs.layer_host_ms(HOST_OPS["op"] * PREPARE_OPS, PREPARE_OPS)
        name, kind = f"{exchange.name} permute ids", MOVE_IDS._replace(stream=stream)
        launch, cost_ms = (HOST_OPS["permute"], 7, 0), exchange.permute_ms()
        return self._add(name, kind, cost_ms, launch, deps, exchange.active, host_ms=host_ms)

    def _read(self, exchanges: Sequence[Exchange], splits: Sequence[Dep] = ()) -> list[Dep]:
        """Read the sizes on the host, which allocates by them: a device-to-host sync."""
        if not exchanges:
            return []
        name, cost_ms = f"{_name(exchanges)} read splits", us(self.hardware.overheads.sync_us)
        active = _any_active(exchanges)
        return [Dep(self._add(name, READ_SPLITS, cost_ms, deps=splits, active=active))]

    def _read_lengths(self) -> None:
        """Read the number of ids of each feature on the host (`KeyedJaggedTensor.length_per_key`).

        The device sums them behind all pending work of the step before.
        """
        sums = self._add("sum lengths", MOVE_IDS, us(self.hardware.elementwise.floor_us))
        sync_ms = us(self.hardware.overheads.sync_us)
        self._add("read lengths", READ_SPLITS, sync_ms, deps=[Dep(sums)])

    def _send(self, exchanges: Sequence[Exchange], read: Sequence[Dep]) -> dict[str, int]:
        """Send lengths, ids and weights; returns exchange name -> op."""
        ids = {}
        for exchange in exchanges:
            name, launch = (
                f"{exchange.name} ids all-to-all",
                (HOST_OPS["ids"], 0, exchange.tensors_sent),
            )
            op = self._add(name, SEND_IDS, exchange.ids_ms(), launch, read, exchange.active)
            ids[exchange.name] = op
        return ids

    def _recats(
        self, module: Sequence[Exchange], stream: str, ids: Mapping[str, int] | None = None
    ) -> dict[str, int]:
        """Reorder received ids by feature; return exchange name -> op."""
        kind, recats = MOVE_IDS._replace(stream=stream), {}
        for exchange in _sending(module):
            name, launch = f"{exchange.name} permute received ids", (HOST_OPS["recat"], 7, 0)
            deps = [ids[exchange.name]] if ids else []
            op = self._add(name, kind, exchange.recat_ms(), launch, deps, exchange.active)
            recats[exchange.name] = op
        return recats

    def _prefetches(self, module: Sequence[Exchange], recats: Mapping[str, int]) -> Iterator[int]:
        """Fetch the next batch's rows into the UVM caches."""
        for exchange in module:
            for group in sorted(exchange.prefetched):
                name, cost_ms = f"{exchange.name} prefetch", exchange.prefetch_ms(group)
                launch, active = (HOST_OPS["lookup"], 6, 0), exchange.group_active(group)
                yield self._add(name, PREFETCH, cost_ms, launch, [*recats.values()], active)

    # --- forward -------------------------------------------------------------------------------

    def _wait(self, ops: Sequence[int], *deps: Dep) -> None:
        """Let the ops that may come first in a forward wait for more."""
        for op in ops:
            self.graph.wait(op, *deps)

    def _computing(self, ops: range) -> list[int]:
        """Return the ops that compute, in the order given, up to the first that all plans have.

        Whichever of them a plan has comes first there, so whatever waits for the first, or is to
        make it wait, needs them all.
        """
        computing = []
        for i in ops:
            if self.graph.ops[i].stream == COMPUTE:
                computing.append(i)
                if self.graph.ops[i].active is None:
                    break
        return computing

    def _forward(self, look_up: LookModuleUp) -> list[int]:
        """Add the dense forward, with lookups where their modules are called.

        Returns:
            The ops that compute, up to the first that every plan has.
        """
        first = len(self.graph.ops)
        for step in self.dense.forward:
            if isinstance(step, LookupCall) and step.module in self.modules:
                look_up(self.modules[step.module])
            elif isinstance(step, DenseSegment):
                if step.waits:
                    self._unpack(step.waits)
                self._segment(step, backward=False)
        return self._computing(range(first, len(self.graph.ops)))

    def _lookups(self, module: Sequence[Exchange], recats: Mapping[str, int]) -> None:
        """Add fused lookups and output distribution of one module's exchanges."""
        for exchange in module:
            recat = recats.get(exchange.name)
            before = [] if recat is None else [Dep(recat)]
            before = self._weigh(exchange, before, backward=False)
            for group in exchange.members:
                self.lookups[group] = self._lookup(exchange, group, before, backward=False)
                self._scatter(exchange, group)
                self._stash(exchange, group)
            outputs = self._outputs(exchange, list(exchange.members), backward=False)
            self.delivered.setdefault(exchange.module, []).extend(outputs)

    def _lookup(
        self, exchange: Exchange, group: int, deps: Sequence[Dep], *, backward: bool
    ) -> int:
        launch = (HOST_OPS["lookup_backward"], 8, 0) if backward else (HOST_OPS["lookup"], 6, 0)
        lookup_ms = exchange.backward_ms if backward else exchange.forward_ms
        cost_ms = lookup_ms(group) + exchange.pack_ms(group, backward=backward)
        name, active = f"{exchange.name} lookup{_way(backward)}", exchange.group_active(group)
        column = Load.BACKWARD_MS if backward else Load.FORWARD_MS
        waiting_ms = exchange.waiting_ms(group, column)
        return self._add(
            name, LOOKUP[backward], cost_ms, launch, deps, active, waiting_ms=waiting_ms
        )

    def _outputs(self, exchange: Exchange, after: list[int], *, backward: bool) -> list[int]:
        """Add the output distribution of one exchange; return the ops whose end delivers it."""
        if exchange.is_local:
            return [] if backward else [self.lookups[g] for g in after]
        ops = HOST_OPS["output_backward"] if backward else HOST_OPS["output"]
        last = after if backward else [self.lookups[group] for group in after]
        for transfer in exchange.outputs(backward=backward):
            name = transfer.name + _way(backward)
            kind = SEND_OUTPUTS[backward]._replace(scope=transfer.scope)
            launch = (ops, 1, 1)
            last = [self._add(name, kind, transfer.cost_ms, launch, last, exchange.active)]
        return last

    def _unpack(self, modules: Sequence[str]) -> None:
        """Wait for the outputs of modules and bring them into the form that the model reads."""
        sharded = [m for m in modules if m in self.modules]
        deps = [Dep(op) for module in sharded for op in self.delivered.get(module, ())]
        unpack = self._copies(UNPACK, sharded, deps, backward=False)
        self.unpacked.append((unpack, sharded))

    def _copies(
        self, name: str, modules: Sequence[str], deps: Sequence[Dep], *, backward: bool
    ) -> int:
        """Copy the outputs of modules' exchanges, or the gradient that they return."""
        cost_ms, host_ms = np.zeros(1), 0.0
        for module in modules:
            exchanges = self.modules[module]
            shared = np.sum([e.active for e in exchanges], axis=0) > 1
            cost_ms = cost_ms + sum(e.unpack_ms(shared, backward=backward) for e in exchanges)
            device_ms, issue_ms = self._spread(module, backward=backward)
            cost_ms, host_ms = cost_ms + device_ms, host_ms + issue_ms
        launch = (HOST_OPS["concat"] * (len(modules) / len(self.modules)), 1, 0)
        return self._add(name, DENSE[backward], cost_ms, launch, deps, host_ms=host_ms)

    def _segment(self, segment: DenseSegment, *, backward: bool) -> int:
        self.segments += 1
        # the longest batch is longer in all segments
        waiting_ms = segment.cost_ms * self.costs.uneven
        return self.graph.add(
            f"dense {self.segments} ({segment.name}){_way(backward)}",
            phase=DENSE[backward].phase,
            resource=segment.resource,
            stream=COMPUTE,
            cost_ms=segment.cost_ms + waiting_ms,
            host_ms=segment.host_ms,
            kernels=segment.kernels,
            waiting_ms=np.full(1, waiting_ms) if waiting_ms else None,
        )

    # --- feature processors ----------------------------------------------------------------------

    def _weigh(self, exchange: Exchange, after: list[Dep], *, backward: bool) -> list[Dep]:
        """Weigh the ids that an exchange looks up; backward, return gradients to the parameters.

        Returns:
            The dependencies of the lookup; ``after`` for a module without a processor.
        """
        if not exchange.processed:
            return after
        host_ms = self._per_op(exchange, self.costs.layer_host_ms(HOST_OPS["op"], 1), backward)
        name = f"{exchange.name} issue position weights{_way(backward)}"
        self._add(name, READ_SPLITS, host_ms, active=exchange.active)
        cost_ms = self._ids_ms(exchange, backward)
        floor_ms = us(self.hardware.elementwise.floor_us)
        cost_ms = cost_ms + self._per_op(exchange, floor_ms, backward)
        name = f"{exchange.name} position weights{_way(backward)}"
        return [Dep(self._add(name, MOVE_IDS, cost_ms, deps=after, active=exchange.active))]

    def _ids_ms(self, exchange: Exchange, backward: bool) -> Array:
        """Price the work of a feature processor that grows with the ids, ``[plans, ranks]``."""
        hw = self.hardware
        time = exchange.cost(lambda n: ids_ms(hw, n, backward=backward), _column(Load.IDS))
        if backward:
            return time
        # positions that are not sent are prepared here as well
        more = READ_BACK_BYTES - RANGE_BYTES + PREPARE_BYTES * exchange.is_local
        return time + exchange.prepared * exchange.cost(
            lambda n: more * n / hw.streaming, _column(Load.IDS)
        )

    def _per_op(self, exchange: Exchange, each_ms: float, backward: bool) -> Array:
        """Sum ``each_ms`` over all ops, ``[plans, ranks]``; a rank without features has none."""
        a_rank, a_feature = OPS[backward]
        world = 1 if exchange.is_replicated else self.costs.topology.world_size
        of_feature = LENGTH_BYTES * self.workload.batch_size * world
        return exchange.cost(
            lambda size: each_ms * (a_feature * size / of_feature + a_rank * (size > 0)),
            lambda load: LENGTH_BYTES * load[..., Load.BAGS],
        )

    def _spread(self, module: str, *, backward: bool) -> tuple[float, float]:
        """Return device and host time of a processor's sum on outputs; 0 without a processor."""
        if module not in self.workload.processed:
            return 0.0, 0.0
        tables = [t for t in self.workload.tables if t.module == module]
        outputs = self.workload.batch_size * sum(
            t.outputs_per_sample * t.embedding_dim for t in tables
        )
        ops = SPREAD_OPS[backward]
        host_ms = self.costs.layer_host_ms(HOST_OPS["op"] * ops, ops)
        return spread_ms(self.hardware, outputs, backward=backward), host_ms

    # --- backward ------------------------------------------------------------------------------

    def _backward(self) -> None:
        """Add the backward in the order of autograd: the latest record runs first.

        Embeddings that were looked up ahead have a backward of their own, behind that of the dense
        part.
        """
        if not self.workload.training:
            return
        self._restore()
        apart, sparse = self.workload.train_pipeline == "semi_sync", GradientReturn | TableUpdate
        for step in sorted(self.dense.backward, key=lambda s: apart and isinstance(s, sparse)):
            if isinstance(step, DenseSegment):
                self._segment(step, backward=True)
            elif isinstance(step, Bucket):
                self._reduce_bucket(step.bytes)
            elif step.module in self.modules:
                module = self.modules[step.module][::-1]
                if isinstance(step, GradientReturn):
                    self._return_gradients(step.module, module)
                elif isinstance(step, TableUpdate):
                    self._update_tables(module)

    def _return_gradients(self, name: str, module: Sequence[Exchange]) -> None:
        split = self._copies(PACK, [name], [], backward=True)
        for exchange in module:
            sent = self._outputs(exchange, [split], backward=True)
            self.arrived[exchange.name] = sent or [split]

    def _update_tables(self, module: Sequence[Exchange]) -> None:
        for exchange in module:
            after = [Dep(i) for i in self.arrived[exchange.name]]
            done = [self._update(exchange, g, after) for g in reversed(exchange.members)]
            self._weigh(exchange, [Dep(op) for op in done], backward=True)
            if exchange.is_replicated:
                # data-parallel tables have their own DDP
                name, cost = f"{exchange.name} gradients", exchange.gradient_sync_ms()
                self._all_reduce(name, cost, done, exchange.active)

    def _reduce_bucket(self, size_bytes: int) -> None:
        """Send a bucket of dense gradients once all ops issued before it have been computed."""
        cost = self.costs.all_ranks.all_reduce(size_bytes, scope="world")
        latest = self._computing(range(len(self.graph.ops) - 1, -1, -1))
        self._all_reduce("dense gradients", cost, latest)

    def _all_reduce(
        self, name: str, cost_ms: Array, after: Sequence[int], active: Mask | None = None
    ) -> None:
        """All-reduce a bucket of gradients as DistributedDataParallel does; the optimizer waits.

        DDP's first bucket is smaller only if `bucket_cap_mb` is not given, but TorchRec gives it
        (model_parallel.py; `_BucketCapacityConfig` of torch/nn/parallel/distributed.py).

        Args:
            after: the operations that produce the gradients.
        """
        if self.costs.topology.whole.world_size > 1:
            name, launch = f"all-reduce {name}", (HOST_OPS["gradient_sync"], 1, 1)
            self.gradients.append(self._add(name, ALL_REDUCE, cost_ms, launch, after, active))

    def _update(self, exchange: Exchange, group: int, after: Sequence[Dep]) -> int:
        """Add the backward of one launch, behind gathering weights that copies have in parts.

        A rank meets only its copies, which are as late as it is.
        """
        if group in self.restored:
            after = [*after, Dep(self.restored[group])]
        if group in self.launches:
            gather, deps = self.costs.copies.all_gather, [*after, Dep(self.scattered[group])]
            self._move_copies(f"{exchange.name} gather copies", group, gather, COMPUTE, deps)
        return self._lookup(exchange, group, after, backward=True)

    def _scatter(self, exchange: Exchange, group: int) -> None:
        """Average the weights of one launch behind its forward, a part on each copy."""
        if group in self.launches:
            scatter, deps = self.costs.copies.reduce_scatter, [Dep(self.lookups[group])]
            name = f"{exchange.name} scatter copies"
            self.scattered[group] = self._move_copies(name, group, scatter, "copies", deps)

    def _move_copies(
        self, name: str, group: int, collective: CostModel, stream: str, deps: Sequence[Dep]
    ) -> int:
        tables, kind = self.launches[group], SYNC_COPIES._replace(stream=stream)
        cost_ms = tables.cost(_if_any(collective), _column(Load.SYNCED_WEIGHTS))
        launch = (HOST_OPS["gradient_sync"], 1, 1)
        return self._add(name, kind, cost_ms, launch, deps, tables.active)

    # --- stashing ------------------------------------------------------------------------------

    def _stash(self, exchange: Exchange, group: int) -> None:
        """Copy the weights of one launch to the host behind its forward."""
        if group in self.stashed and self.workload.training:
            name, after = f"stash {exchange.name}", [Dep(self.lookups[group])]
            self.stashes[group] = self._move_weights(name, STASH, group, after)

    def _restore(self) -> None:
        """Bring stashed weights and states back from where the backward begins."""
        # the dense forward, since some plans have no lookups
        forward = DENSE[False].phase
        begins = Dep(max(i for i, op in enumerate(self.graph.ops) if op.phase == forward))
        for group, op in self.stashes.items():
            name = f"restore {self.stashed[group].module}"
            self.restored[group] = self._move_weights(name, RESTORE, group, [begins, Dep(op)])
        if self.state_bytes:
            self.states = self._move_states("restore", RESTORE, begins)

    def _move_weights(self, name: str, kind: OpKind, group: int, deps: Sequence[Dep]) -> int:
        tables, copy = self.stashed[group], _if_any(partial(copy_h2d_ms, self.hardware))
        cost_ms = tables.cost(copy, _column(Load.SYNCED_WEIGHTS))
        return self._add(name, kind, cost_ms, (HOST_OPS["copy"], 1, 0), deps, tables.active)

    def _move_states(self, verb: str, kind: OpKind, after: Dep) -> int:
        cost_ms = copy_h2d_ms(self.hardware, self.state_bytes)
        name = f"{verb} optimizer states"
        return self._add(name, kind, cost_ms, (HOST_OPS["copy"], 1, 0), [after])

    # --- optimizer -----------------------------------------------------------------------------

    def _optimizer_step(self) -> None:
        """Step dense parameters, and the shards with dense gradients on the ranks that have them.

        `BatchedDenseEmbeddingBag` has no optimizer of its own.
        """
        if not self.workload.training:
            return
        step = self.dense.optimizer
        step_ms = np.asarray(step.cost_ms)
        for exchange in self.exchanges:
            if exchange.is_dense:
                step_ms = step_ms + exchange.optimizer_ms(self.costs.optimizer_ms)
        host_ms = self.costs.pipeline_host_ms()
        host_ms += self.costs.step_host_ms(self.dense.parameters, step.kernels)
        work, deps = ("optimizer step", OPTIMIZER, step_ms), [*self.gradients]
        deps += [] if self.states is None else [self.states]
        stepped = self._add(*work, deps=deps, host_ms=host_ms, kernels=step.kernels)
        if self.states is not None:
            stashed = self._move_states("stash", STASH, Dep(stepped))
            self.graph.wait(self.states, Dep(stashed, lag=1))

    # --- copies of tables ------------------------------------------------------------------------

    def _copied_tables(
        self, groups: Sequence[LookupGroup], loads: Array, make: type[Exchange]
    ) -> tuple[list[tuple[Exchange, Load]], dict[int, Exchange]]:
        """Return the tables that one call of ``sync`` averages, each with the column of its bytes.

        Under ``FULLY_SHARDED``, return the tables of each launch instead.
        """
        fused = [i for i, group in enumerate(groups) if group.fused]
        if self.copies is None or not fused:
            return [], {}
        if self.copies.fully_sharded:
            if self.hardware.device == "cpu":
                raise InputError(
                    "replica_groups.sharding_strategy is fully_sharded, which TorchRec runs on "
                    "CUDA streams and ranks on CPUs cannot; give default, or a profile of GPUs"
                )
            return [], {i: make(self.costs, groups, [i], loads, f"copies {i}") for i in fused}
        averaged = []
        for data_type in dict.fromkeys(groups[i].data_type for i in fused):
            of_type = [i for i in fused if groups[i].data_type == data_type]
            weights = make(self.costs, groups, of_type, loads, f"{data_type} weights")
            averaged.append((weights, Load.SYNCED_WEIGHTS))
        states = make(self.costs, groups, fused, loads, "optimizer states")
        return [*averaged, (states, Load.SYNCED_STATES)], {}

    def _average_copies(self) -> None:
        """Add a step's mean share of averaging; a rank meets only its copies, as late as it is."""
        if self.copies is None or not self.averaged:
            return
        model, steps = self.costs.copies.all_reduce, self.copies.sync_interval
        count = len(self.averaged)
        parts = [
            tables.cost(_if_any(model, steps), _column(column)) for tables, column in self.averaged
        ]
        cost_ms = np.asarray(sum(parts, np.zeros((1, 1))))
        host_ms = self.costs.host_ms(HOST_OPS["gradient_sync"] * count, count, count) / steps
        active = _any_active([tables for tables, _ in self.averaged])
        work = "average copies of tables", SYNC_COPIES, cost_ms
        self._add(*work, active=active, host_ms=host_ms, kernels=count)


def _sending(exchanges: Sequence[Exchange]) -> list[Exchange]:
    return [exchange for exchange in exchanges if not exchange.is_local]


def _way(backward: bool) -> str:
    return " backward" if backward else ""


def _name(exchanges: Sequence[Exchange]) -> str:
    return exchanges[0].name if len(exchanges) == 1 else "fused"


def _any_active(exchanges: Sequence[Exchange]) -> Mask:
    return np.asarray(np.any([exchange.active for exchange in exchanges], axis=0))


def _column(column: Load) -> Size:
    return lambda load: load[..., column]


def _if_any(collective: CostModel, steps: int = 1) -> CostModel:
    """Price a collective at 0 for a rank without tensors, which starts none, nor do its copies."""
    return lambda size: np.where(size > 0, collective(size), 0.0) / steps
