"""HugeCTR's software on a profile: precision, factors on kernel times, cost of a step.

`predictor/hardware/runtimes/hugectr.yaml` holds the constants with their sources; ``python -m lab
fit hugectr`` fits them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from predictor.cost.collectives import Array, Collectives, latency_ms, transfer_ms
from predictor.cost.elementwise import memory_ms
from predictor.cost.gemm import gemm_ms
from predictor.cost.loads import Load
from predictor.hardware.loader import load_runtime
from predictor.hardware.schema import Curve, HardwareProfile
from predictor.iteration.graph import Dep, Graph
from predictor.iteration.plan_scorer import PlanScorer
from predictor.iteration.timeline import simulate
from predictor.iteration.torchrec.sparse import HIERARCHICAL, Exchange, Transfer, busiest, exchanges
from predictor.model.plan import ShardingPlan
from predictor.model.plan_check import match_plan
from predictor.model.topology import Topology
from predictor.model.workload import DATA_TYPE_BYTES, DcnV2, QComm, Workload
from predictor.units import us


@dataclass(frozen=True)
class Runtime:
    """Constants of a HugeCTR release.

    Args:
        name: name in reports.
        dense_type: data type of the dense part and of embeddings on the wire.
        graph_node_us: time from a kernel's end to the next one's start inside a CUDA graph.
        lookup_factor, update_factor: kernel times of embedding forward and backward over those of
            FBGEMM's TBE in the profile; the hybrid's update over streaming its bytes.
        gemm_factor: kernel times of dense layers over those of the profile.
        step_us: time of an iteration besides its kernels and transfers: launching the graph,
            the data reader, and the barrier of all ranks.
        hybrid: the hybrid embedding of rounds v2.x, whose kernels and all-reduce load from and
            store to the other ranks directly; None in other rounds.
    """

    name: str
    dense_type: str
    graph_node_us: float
    lookup_factor: float
    update_factor: float
    gemm_factor: float
    step_us: float
    hybrid: HybridRule | None = None


@cache
def load_runtimes() -> Mapping[str, Runtime]:
    """Return name -> runtime for all shipped runtimes."""
    file: dict[str, Any] = load_runtime("hugectr")
    runtimes = {}
    for name, constants in file["runtimes"].items():
        rule, hybrid = constants.get("hybrid"), None
        if rule is not None:
            hybrid = HybridRule(
                rule["duplicates"], rule["all_to_all_gb_s"] / rule["all_reduce_gb_s"]
            )
        runtimes[name] = Runtime(**{"name": name, **file["shared"], **constants, "hybrid": hybrid})
    return runtimes


def runtime_of_round(version: tuple[int, ...], *, preview: bool = False) -> Runtime:
    """Return HugeCTR's runtime of an MLPerf round, e.g. (3, 1).

    Args:
        preview: use the code of v2.1 for hardware that was not sold yet.
    """
    if version < (3, 0):
        release = "v2.1 preview" if preview else "v2.0"
    else:
        release = "v3.0" if version < (3, 1) else "v3.1+"
    return load_runtimes()[f"hugectr {release}"]


@dataclass(frozen=True)
class HybridRule:
    """Arguments of HugeCTR's ``HybridEmbeddingParam`` in a submission.

    Args:
        duplicates: ``p_dup_max``, probability of a repeated infrequent row, in (0, 1).
        bandwidth_ratio: bandwidth of the all-to-all over that of the all-reduce, times
            ``efficiency_bandwidth_ratio``.
    """

    duplicates: float
    bandwidth_ratio: float

    def threshold(self, batch: int, ranks: int, hosts: int) -> float:
        """Return the number of occurrences in a batch from which a row is frequent.

        Args:
            batch: samples of all ranks.
        """
        if hosts > 1:
            return hosts * self.bandwidth_ratio * hosts / (hosts - 1)
        local = max(batch / ranks, 2.0)
        return float(batch * math.sqrt(2 * self.duplicates / (local * (local - 1))))


@dataclass(frozen=True)
class HybridSplit:
    """Split of a workload into frequent and infrequent rows.

    Args:
        infrequent: share of the lookups in infrequent rows, served by other ranks, in [0, 1].
        needed: frequent rows in a rank's samples over its lookups, in [0, 1].
        elements: number of elements of all frequent rows.
    """

    infrequent: float
    needed: float
    elements: float

    @classmethod
    def of(cls, workload: Workload, rule: HybridRule, ranks: int, hosts: int) -> HybridSplit:
        """Return the expected split of a batch of ``ranks`` times the workload's."""
        batch = workload.batch_size * ranks
        threshold = rule.threshold(batch, ranks, hosts)
        lookups = served = needed = elements = 0.0
        for table in workload.tables:
            for feature in table.features:
                bins = feature.distribution.bins(table.num_embeddings)
                draws = batch * feature.lookups_per_sample
                often = float(bins.counts[draws * bins.probs >= threshold].sum())
                frequent = bins.slice(0.0, often)
                lookups += draws
                served += draws * frequent.mass
                needed += ranks * frequent.unique(draws / ranks)
                elements += often * table.embedding_dim
        return cls(1 - served / lookups, needed / lookups, elements)


_LARGE = 2.0**36
"""Size of a message whose latency is negligible."""


def direct(links: Collectives, size_bytes: ArrayLike) -> Array:
    """Return the ms of a kernel that loads from or stores to all other ranks' memory alike.

    It has neither NCCL's protocols nor its staging buffers: the all-to-all's latency and the
    bandwidth of its largest messages. Sizes are those of an all-to-all.
    """
    size = np.asarray(size_bytes, dtype=np.float64)
    first, last = (links.all_to_all(large, "intra") for large in (_LARGE, 2 * _LARGE))
    return np.asarray(links.floor_ms("all_to_all", "intra") + size * (last - first) / _LARGE)


def rail(links: Collectives, size_bytes: ArrayLike) -> Array:
    """Return the ms of a rail all-reduce, one rank of each intra group, in switches (SHARP).

    Each NIC carries the buffer once, in both directions at a time, and nothing waits for a tree
    to come back down.
    """
    top, size = links.topology, np.asarray(size_bytes, dtype=np.float64)
    if top.groups == 1:
        return np.zeros_like(size)
    curve = links.hardware.collectives.inter.all_reduce
    return latency_ms(curve, top.groups) / 2 + transfer_ms(curve, size, top.groups)


def switches_of(curve: Curve, ranks: int) -> tuple[int, ...]:
    """Return the number of cards behind each switch of a host; () where no uplink counts.

    Args:
        curve: of all-to-alls; its cost stays that of two cards up to those of one switch.
    """
    cards = max((n for n, cost in curve.rank_cost.items() if cost == 1.0), default=0)
    return (cards,) * (ranks // cards) if 0 < cards < ranks and ranks % cards == 0 else ()


def uplink_size(sent: Array, switches: Sequence[int], cards: int) -> Array:
    """Return the equal bytes per rank that load an uplink like the busiest one, ``[..., 1]``.

    Args:
        sent: bytes that each rank sends to all ranks alike, itself included, ``[..., ranks]``.
        switches: cards behind each switch, in the order of the ranks.
        cards: behind each switch of the curve's machine, whose switches are equal.
    """
    ranks = sent.shape[-1]
    total, busiest, first = sent.sum(axis=-1), np.zeros(sent.shape[:-1]), 0
    for count in switches:
        own = sent[..., first : first + count].sum(axis=-1)
        up, down = own * (ranks - count) / ranks, (total - own) * count / ranks
        busiest, first = np.maximum(busiest, np.maximum(up, down)), first + count
    return np.asarray(busiest * ranks / (cards * (ranks - cards)))[..., None]


RESOURCES = {
    "embedding_forward": "embedding",
    "embedding_backward": "embedding",
    "dense_forward": "gemm",
    "dense_backward": "gemm",
    "host": "overheads",
}
"""Phase -> profile group of its time; other phases stream through memory."""
MASTER_PASSES = 6
"""Adagrad on fp32 master weights: weight, state and gradient, read or written, and the fp16 copy
(two halves)."""


class HugeCtrBuilder:
    """Builder of the graph of one HugeCTR iteration.

    Args:
        workload: the runtime replaces the precision of its dense part and wire.
        switches: cards behind each PCIe switch of the host; the profile's unless given.
    """

    def __init__(
        self,
        workload: Workload,
        topology: Topology,
        hardware: HardwareProfile,
        plan: ShardingPlan,
        runtime: Runtime,
        switches: tuple[int, ...] = (),
    ) -> None:
        self.dtype = runtime.dense_type
        self.workload = replace(
            workload,
            dense=replace(workload.dlrm, data_type=self.dtype),
            qcomm=QComm(self.dtype, self.dtype),
        )
        self._widths()
        self.topology = topology
        self.hardware = hardware
        # HugeCTR reduces the gradients of a row without FBGEMM's blocks
        lookups = hardware.embedding.model_copy(update={"block_loads": 0.0})
        kernels = hardware.model_copy(update={"embedding": lookups})
        scorer = PlanScorer(self.workload, topology, kernels)
        self.costs = scorer.costs
        self.plan_loads = scorer.totals(match_plan(self.workload, topology, plan))[None]
        self.groups = scorer.groups
        usual = switches_of(hardware.collectives.intra.all_to_all, topology.world_size)
        self.cards = usual[0] if usual and topology.hosts == 1 else 0
        self.switches = switches or usual
        self.use(runtime)

    def use(self, runtime: Runtime) -> None:
        """Predict with the constants of a runtime of the same precision."""
        self.runtime = runtime
        self.loads = self.plan_loads
        self.split: HybridSplit | None = None
        if runtime.hybrid is not None:
            ranks, hosts = self.topology.world_size, self.topology.hosts
            self.split = HybridSplit.of(self.workload, runtime.hybrid, ranks, hosts)
            mean = self.plan_loads.mean(axis=2, keepdims=True)
            self.loads = np.broadcast_to(mean, self.plan_loads.shape).copy()
            # one host has no all-reduce of frequent rows: each rank fetches those it needs
            fetched = self.split.needed if hosts == 1 else 0.0
            self.loads[..., Load.OUTPUTS] *= self.split.infrequent + fetched
        self.exchanges = exchanges(self.costs, self.groups, self.loads)

    def iteration_ms(self) -> float:
        return float(simulate(self.build()).iteration_ms[0])

    def build(self) -> Graph:
        """Build lookups, exchange, dense part forward and backward, exchange and updates."""
        self.graph = Graph(self.topology.world_size, self.topology.intra_group_size)
        self.parameters = 0
        self.lookups: list[int] = []
        bottom = self._layers(self.bottom, "bottom")
        delivered = [op for e in self.exchanges for op in self._forward(e)]
        self._add("arrange embeddings", "dense_forward", self._arrange_ms(), [*delivered, bottom])
        self._add("dot", "dense_forward", self._dot_ms(), [])
        self._layers(self.deep, "dense")
        gradients = self._backward(self.deep)
        self._add("dot backward", "dense_backward", 2 * self._dot_ms(), [gradients])
        arrange = self._add("arrange gradients", "dense_backward", self._arrange_ms(), [])
        sent: dict[str, list[int]] = {}
        if not self._is_direct:
            sent = {e.name: self._return_gradients(e, arrange) for e in self.exchanges}
        last = self._backward(self.bottom)
        reduced = self._reduce(last)
        if self._is_direct:
            # local gradients come first, so the all-reduce has the links to itself
            sent = {e.name: self._return_gradients(e, arrange) for e in self.exchanges}
        updated = [op for e in self.exchanges for op in self._update(e, sent[e.name])]
        step = self._add("optimizer step", "optimizer", self._step_ms(), [*reduced])
        end = self._add("end of graph", "host", us(self.runtime.step_us), [*updated, step])
        for first in (0, *self.lookups):
            self.graph.wait(first, Dep(end, lag=1))
        return self.graph

    # --- sparse --------------------------------------------------------------------------------

    def _forward(self, exchange: Exchange) -> list[int]:
        """Add pooled lookups, then the exchange with the ranks of the samples."""
        transfers = self._outputs(exchange, backward=False)
        times = [self.runtime.lookup_factor * exchange.forward_ms(g) for g in exchange.members]
        name, phase = f"{exchange.name} lookup", "embedding_forward"
        if self.split is not None:
            return self._hybrid_forward(name, times, transfers)
        stores: Array | float = 0.0
        if transfers and exchange.sharding_type in HIERARCHICAL:
            # the pooling kernel stores into the memory of the host's ranks (hier_model_forward.cu)
            stores = transfers[0].cost_ms
            transfers[0] = replace(transfers[0], cost_ms=self._partial_sums_ms(exchange))
        lookups = [self._add(name, phase, np.maximum(t, stores), [], "embedding") for t in times]
        self.lookups += lookups
        return self._run(transfers, lookups, "output_dist_forward")

    def _hybrid_forward(
        self, name: str, times: Sequence[Array], transfers: Sequence[Transfer]
    ) -> list[int]:
        """Look up rows of other ranks first, so that a rank's own do not wait for the network.

        On one host a rank reads its frequent rows from a cache that the exchange fills.
        """
        assert self.split is not None
        rare = self.split.infrequent
        phase = "embedding_forward"
        sent = [self._add(f"{name} rare", phase, rare * t, [], "embedding") for t in times]
        self.lookups += sent
        arrived = self._run(transfers, sent, "output_dist_forward")
        after = arrived if self._is_direct else []
        return arrived + [self._add(name, phase, (1 - rare) * t, after, "embedding") for t in times]

    def _return_gradients(self, exchange: Exchange, after: int) -> list[int]:
        """Send the gradients back; those of frequent rows are summed locally first."""
        waits = [after]
        if self.split is not None:
            share = 1 - self.split.infrequent
            waits = [
                self._add(
                    f"{exchange.name} local gradients",
                    "embedding_backward",
                    share * self._update_ms(exchange, group),
                    [after],
                    "embedding",
                )
                for group in exchange.members
            ]
        return self._run(self._outputs(exchange, backward=True), waits, "output_dist_backward")

    @property
    def _is_direct(self) -> bool:
        """True for the hybrid embedding on one host, where ranks read each other's rows."""
        return self.split is not None and self.topology.groups == 1

    def _outputs(self, exchange: Exchange, *, backward: bool) -> list[Transfer]:
        """Return the exchanges of outputs or their gradients in running order.

        Hierarchical ones cross NVLink among all ranks of a host, then the network among those of
        one rail (`NcclAll2AllComm::hier_communicate`). Partial sums of row splits are reduced in
        between; rows of the hybrid embedding are not.
        """
        reduced = exchange.sharding_type in HIERARCHICAL
        width = DATA_TYPE_BYTES[self.dtype]
        if exchange.is_local:
            return []
        if not reduced and self.split is None:
            return [self._transfer(exchange, "world", width)]
        transfers = [self._transfer(exchange, "intra", width)]
        if self.topology.groups > 1:
            across = width / self.topology.intra_group_size if reduced else width
            transfers.append(self._transfer(exchange, "cross", across))
        return transfers[::-1] if backward else transfers

    def _transfer(self, exchange: Exchange, scope: str, width: float) -> Transfer:
        comms = self.costs.collectives
        model = partial(comms.all_to_all, scope=scope)
        if scope == "intra":
            model = partial(direct, comms)
        cost = exchange.cost(model, self._busiest(width))
        return Transfer(f"{exchange.name}.{scope}", scope, cost)

    def _busiest(self, width: float) -> Callable[[Array], Array]:
        """Return a function for the bytes of the busiest rank, or of the busiest uplink's mean."""
        if not self.cards:
            return busiest(Load.OUTPUTS, width)
        return lambda load: uplink_size(width * load[..., Load.OUTPUTS], self.switches, self.cards)

    def _partial_sums_ms(self, exchange: Exchange) -> Array:
        """Return the ms to reduce the stored partial sums of a host's ranks to outputs."""
        width = DATA_TYPE_BYTES[self.dtype] * (1 + 1 / self.topology.intra_group_size)
        return exchange.cost(partial(memory_ms, self.hardware), busiest(Load.OUTPUTS, width))

    def _run(self, transfers: Sequence[Transfer], after: list[int], phase: str) -> list[int]:
        for transfer in transfers:
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
        """Add segmented gradients and the optimizer, on rows sorted by the data reader."""
        share = 1.0 if self.split is None else self.split.infrequent
        updates = []
        for group in exchange.members:
            cost = share * self._update_ms(exchange, group)
            updates.append(self._add(f"{exchange.name} update", "embedding_backward", cost, after))
        return updates

    def _update_ms(self, exchange: Exchange, group: int) -> Array:
        """Return the ms of an update; replicated tables are small and stream through memory.

        The hybrid embedding sorts nothing: each lookup's gradient is added to an fp32 row with
        atomics (`frequent_local_reduce`, `infrequent_update_model_direct`).
        """
        if self.split is not None:
            added = self.plan_loads[:, group, :, Load.OUTPUTS].mean(axis=-1, keepdims=True)
            size = (DATA_TYPE_BYTES[self.dtype] + 2 * 4.0) * added
            return self.runtime.update_factor * memory_ms(self.hardware, size)
        if not exchange.is_local:
            return self.runtime.update_factor * exchange.backward_ms(group)
        load = self.loads[:, group]
        width = DATA_TYPE_BYTES[self.dtype]
        size = width * load[..., Load.OUTPUTS] + 4.0 * MASTER_PASSES * load[..., Load.GRADIENTS]
        return memory_ms(self.hardware, size)

    def _reduce(self, after: int) -> list[int]:
        """Add one all-reduce of dense gradients and those of replicated rows, in half precision."""
        replicated = float(self.loads[..., Load.GRADIENTS].sum(axis=1).max())
        if self.split is not None and self.topology.groups > 1:
            replicated += self.split.elements
        size = np.float64(DATA_TYPE_BYTES[self.dtype] * (self.parameters + replicated))
        if self.topology.world_size == 1:
            return [after]
        hybrid = self.split is not None
        model = self._one_shot_ms if hybrid else self.costs.collectives.all_reduce
        return [
            self.graph.add(
                "all-reduce gradients",
                phase="all_reduce",
                resource="collectives",
                stream="comm",
                cost_ms=np.asarray(model(size)),
                deps=[Dep(after)],
                scope="world",
            )
        ]

    def _one_shot_ms(self, size: np.float64) -> Array:
        """Return the ms of HugeCTR's all-reduce of v2.x (all_reduce_comm.cu, ib_comm_ar.cu).

        Every rank loads its part from all others of its host, the switches of the network add up
        the parts of one rail (SHARP, so each NIC carries them once either way), and every rank
        loads the other parts. It runs in blocks, so the slower of the two links counts.
        """
        comms = self.costs.collectives
        inside = 2 * direct(comms, size)
        if self.topology.groups == 1:
            return inside
        across = rail(comms, size / self.topology.intra_group_size)
        waits = (float(rail(comms, 0.0)), 2 * comms.floor_ms("all_to_all", "intra"))
        return np.asarray(np.maximum(inside + waits[0], across + waits[1]))

    # --- dense ---------------------------------------------------------------------------------

    def _widths(self) -> None:
        """Set the layers as (inputs, outputs), and the interaction's input and output columns."""
        dense, tables = self.workload.dlrm, self.workload.tables
        bottom = (dense.in_features, *dense.bottom_mlp)
        self.bottom = list(pairwise(bottom))
        # bottom output and pooled outputs side by side
        self.vectors = bottom[-1] + sum(t.embedding_dim * len(t.features) for t in tables)
        self.top_input, crossed = self.vectors, []
        if isinstance(dense.interaction, DcnV2):
            rank = dense.interaction.low_rank_dim
            crossed = [(self.vectors, rank), (rank, self.vectors)] * dense.interaction.layers
        elif dense.interaction == "dot":
            count = 1 + sum(len(table.features) for table in tables)
            self.top_input = bottom[-1] + count * (count - 1) // 2
        self.deep = [*crossed, *pairwise((self.top_input, *dense.top_mlp))]

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
        """Return the ms of one multiplication with its fused epilogue."""
        time = gemm_ms(self.hardware, m, n, k, self.dtype) - us(
            self.hardware.gemm.floor_of(self.dtype)
        )
        return self.runtime.gemm_factor * time

    def _arrange_ms(self) -> float:
        """Return the ms to copy received embeddings into the interaction's layout."""
        width = DATA_TYPE_BYTES[self.dtype]
        size = 2 * width * self.workload.batch_size * self.vectors
        if self.split is not None:
            return 0.0  # the hybrid embedding writes into the interaction's input
        return float(memory_ms(self.hardware, size))

    def _dot_ms(self) -> float:
        """Return the ms of the fused kernel of pairwise products: vectors in, products out."""
        if self.workload.dlrm.interaction != "dot":
            return 0.0
        elements = self.vectors + self.top_input
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
