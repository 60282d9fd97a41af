"""One training iteration as data: operations, what they cost on each rank, what they wait for.

Ranks of a plan run the same program, so an operation carries one cost per rank; in a graph of a
trace it may exist on some ranks only. Costs may have a leading axis of plans; the timeline treats
both alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictor.cost.errors import OVERHEADS, CostErrors
from predictor.hardware import learned as parts
from predictor.hardware.learned import Learned
from predictor.model.topology import Topology

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
Scope = str | tuple[int, ...]
"""The ranks that a collective joins: ``world``, ``intra`` (one intra group), ``cross`` (equal
positions of all intra groups), or the ranks themselves."""


MAIN = "main"
"""The host thread that runs the program."""


@dataclass(frozen=True)
class Dep:
    """Wait for the end of operation ``op`` of this iteration, or of ``lag`` iterations ago."""

    op: int
    lag: int = 0


@dataclass(frozen=True, eq=False)
class Op:
    """Operation on every rank.

    Args:
        name: as it appears in a trace.
        phase: the named part of the breakdown that its time belongs to.
        resource: the profile group that its cost comes from, for provenance and interval.
        stream: operations of one stream run one after the other, in program order.
        cost_ms: ``[ranks]`` or ``[plans, ranks]``, execution time once started.
        host_ms: time the host thread needs to issue it.
        kernels: launches that ``host_ms`` covers; the first kernel can start after the first of
            them, the operation cannot end before the last.
        deps: operations that it waits for besides its stream and the host.
        scope: None, or the ranks that a collective joins. All of them start at the last arrival.
        blocks_host: the host thread waits until it has ended.
        active: None, or ``[plans]``: where False the operation does not exist in that plan.
        thread: the host thread that issues it; an inline operation runs on it. A thread waits for
            another by an inline operation that depends on one of the other's.
        ranks: None, or the only ranks on which it exists.
        waiting_ms: part of ``cost_ms`` in which a mean rank waits for the one with the longest
            batch; None: nothing.
        fills: True if it fills the device: an operation that becomes ready on another stream while
            it runs starts only after it. None: it competes with nothing.
    """

    name: str
    phase: str
    resource: str
    stream: str
    cost_ms: Array
    host_ms: float = 0.0
    kernels: int = 1
    deps: tuple[Dep, ...] = ()
    scope: Scope | None = None
    blocks_host: bool = False
    active: Mask | None = None
    thread: str = MAIN
    ranks: tuple[int, ...] | None = None
    fills: bool | None = None
    waiting_ms: Array | None = None

    def cost_on(self, rank: int) -> float:
        """Return ``cost_ms`` on a rank, in the first plan."""
        return _on_rank(self.cost_ms, rank)

    def waiting_on(self, rank: int) -> float:
        """Return ``waiting_ms`` on a rank, in the first plan, at most its cost."""
        waiting = 0.0 if self.waiting_ms is None else _on_rank(self.waiting_ms, rank)
        return min(waiting, self.cost_on(rank))

    def absent(self, world_size: int) -> Mask | None:
        """Mark where it does not exist, ``[plans or 1, ranks]``; None if it exists everywhere."""
        if self.ranks is None:
            return None if self.active is None else ~self.active[:, None]
        absent = np.ones((1, world_size), dtype=np.bool_)
        absent[:, list(self.ranks)] = False
        return absent if self.active is None else absent | ~self.active[:, None]


def _on_rank(times: Array, rank: int) -> float:
    return float(times[..., min(rank, times.shape[-1] - 1)].flat[0])


COMPUTE = "compute"
"""The stream of all kernels."""


@dataclass(eq=False)
class Graph:
    """Operations of one iteration in the order in which the host issues them.

    Args:
        world_size, intra_group_size: ranks, and ranks per intra group.
        inline_streams: streams that are the issuing host thread itself (all computation, on a CPU).
        launch_latency_ms: from the end of a launch on the host to the earliest start.
    """

    world_size: int
    intra_group_size: int
    inline_streams: frozenset[str] = frozenset()
    launch_latency_ms: float = 0.0
    ops: list[Op] = field(default_factory=list)

    def add(
        self,
        name: str,
        *,
        phase: str,
        resource: str,
        stream: str,
        cost_ms: Array | float,
        deps: Sequence[Dep | int] = (),
        **more: Any,
    ) -> int:
        """Append an operation and return its index; a dependency may be given as a bare index.

        Ranks that compute on the host move the bytes of a collective on the same cores. Such a
        collective becomes host work followed by a synchronisation that takes no time, so only
        waiting for other ranks can overlap.

        Args:
            more: other fields of `Op`.
        """
        cost = np.atleast_1d(np.asarray(cost_ms, dtype=np.float64))
        waits = tuple(Dep(d) if isinstance(d, int) else d for d in deps)
        if more.get("scope") is not None and COMPUTE in self.inline_streams:
            where = {key: more[key] for key in ("active", "thread", "ranks") if key in more}
            work = f"{name} on the host"
            self.ops.append(Op(work, phase, resource, COMPUTE, cost, deps=waits, **where))
            cost, waits = np.zeros(1), (*waits, Dep(len(self.ops) - 1))
        self.ops.append(Op(name, phase, resource, stream, cost, deps=waits, **more))
        return len(self.ops) - 1

    def wait(self, op: int, *deps: Dep) -> None:
        """Let an operation wait for more, e.g. for one that comes later in the program (lag 1)."""
        self.ops[op] = replace(self.ops[op], deps=self.ops[op].deps + deps)

    def members(self, scope: Scope, rank: int) -> NDArray[np.intp]:
        """Return the ranks that meet in a collective of a scope together with ``rank``."""
        width = self.intra_group_size
        ranks: NDArray[np.intp] = np.arange(self.world_size, dtype=np.intp)
        if isinstance(scope, tuple):
            return np.array(scope, dtype=np.intp)
        if scope == "intra":
            ranks = ranks[ranks // width == rank // width]
        elif scope == "cross":
            ranks = ranks[ranks % width == rank % width]
        return ranks


SPLITS = "splits all-to-all"
"""Exchanges announce their ids together or one by one; the collective has one error."""


def costs_nothing(op: Op) -> bool:
    """Tell whether an operation has no time to multiply."""
    return op.cost_ms.size == 1 and not op.cost_ms.any()


def error_of(op: Op, errors: CostErrors, topology: Topology) -> NDArray[np.float64]:
    """Draw the factor on an operation's execution time, ``[draws]``.

    Collectives of all ranks have the error of the slowest link that ranks span.
    """
    name = SPLITS if op.name.endswith(SPLITS) else op.name
    within = topology.groups == 1 or op.scope == "intra"
    link = f"collectives.{'intra' if within else 'inter'}"
    return errors.op(op.resource, name, link, part_of(op))


def draw_graph(graph: Graph, errors: CostErrors, topology: Topology) -> Graph:
    """Apply one draw of the errors to a graph; the host's times have the error of the host."""
    host = float(errors.shared(OVERHEADS)[0])
    drawn = _scaled(graph, lambda op: float(error_of(op, errors, topology)[0]), lambda op: host)
    return replace(drawn, launch_latency_ms=graph.launch_latency_ms * host)


def learned_graph(graph: Graph, learned: Learned) -> Graph:
    """Apply the learned factors to a graph."""

    def host(op: Op) -> float:
        return learned.factor(host_part_of(op, graph))

    scaled = _scaled(graph, lambda op: learned.factor(part_of(op)), host)
    latency = scaled.launch_latency_ms * learned.factor(parts.HOST)
    return replace(scaled, launch_latency_ms=latency)


def _scaled(graph: Graph, factor: Callable[[Op], float], host: Callable[[Op], float]) -> Graph:
    """Multiply the times of execution and of the host by a factor each."""
    ops = [
        replace(
            op,
            cost_ms=op.cost_ms if costs_nothing(op) else op.cost_ms * factor(op),
            host_ms=op.host_ms * host(op),
        )
        for op in graph.ops
    ]
    return replace(graph, ops=ops)


DENSE_PARTS = {
    "dense_forward": f"{parts.DENSE}.forward",
    "dense_backward": f"{parts.DENSE}.backward",
    "optimizer": f"{parts.DENSE}.optimizer",
}


UNPACK, PACK = "unpack embeddings", "pack gradients"
"""Operations of the dense phases that copy what exchanges deliver, or return."""


def host_part_of(op: Op, graph: Graph) -> str:
    """Return the part of an operation's host time; see `part_of`.

    Where the host computes, an operation of the dense part and its launch are one.
    """
    part = part_of(op)
    inline = COMPUTE in graph.inline_streams
    return part if inline and part in DENSE_PARTS.values() else parts.HOST


def part_of(op: Op) -> str:
    """Return the part of `predictor.hardware.learned` whose factors an execution time has.

    The factors of lookups are on the loads of their tables.
    """
    if op.resource == OVERHEADS:
        return parts.HOST
    if op.name.startswith((UNPACK, PACK)) or (op.phase, op.resource) == (
        "input_dist",
        "elementwise",
    ):
        return parts.COPIES
    if op.phase in DENSE_PARTS:
        return DENSE_PARTS[op.phase]
    if op.resource != "collectives" or op.phase == "replica_sync":
        return parts.FIXED
    name = op.name.removesuffix(" on the host")
    if op.phase == "input_dist":
        return f"{parts.EXCHANGES}.{'splits' if name.endswith(SPLITS) else 'ids'}"
    if op.phase == "all_reduce":
        return f"{parts.EXCHANGES}.gradients"
    way = "backward" if op.phase == "output_dist_backward" else "forward"
    kind = name.removesuffix(" backward").rpartition(".")[2]
    return f"{parts.EXCHANGES}.{way}.{kind}"
