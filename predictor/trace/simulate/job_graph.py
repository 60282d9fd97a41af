"""The graph of several ranks: the nodes of each rank in order, with shared collectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from predictor.errors import InputError
from predictor.iteration.graph import Dep, Graph
from predictor.trace.events import DeviceEvent
from predictor.trace.simulate.graph import COLLECTIVE, COMPUTE, COPY, HOST, RankGraph, RankOp
from predictor.units import us

FILLING_WAVES = 2.0
"""Waves from which on a kernel fills the device for most of its time."""
RESOURCES = {HOST: "overheads", COMPUTE: "kernels", COLLECTIVE: "collectives", COPY: "memcpy"}


@dataclass(frozen=True)
class JobGraph:
    """The graph of all ranks; ``place[rank][node]`` is the operation that a node became."""

    graph: Graph
    place: list[list[int]]


def join_ranks(programs: Sequence[RankGraph], latency_us: float) -> JobGraph:
    """One graph of several ranks whose collectives meet.

    A collective takes as long as on the rank that arrived last: the shortest of its kernels, since
    the others waited in theirs. Waiting for ranks that were not traced is part of that time.

    Raises:
        InputError: the ranks' collectives do not follow each other in one order.
    """
    inline = frozenset(n.stream for p in programs for n in p.nodes if n.stream.startswith(HOST))
    world = len(programs)
    job = JobGraph(Graph(world, world, inline, us(latency_us)), [[] for _ in programs])
    members = _members(programs)
    waiting: dict[tuple[object, ...], set[int]] = {}
    while any(len(place) < len(p.nodes) for place, p in zip(job.place, programs, strict=True)):
        moved = False
        for rank, program in enumerate(programs):
            for node in _ready(job.place[rank], program, members, waiting, rank):
                job.place[rank].append(_emit(job, rank, node))
                moved = True
        for key, ranks in list(waiting.items()):
            if ranks == members[key]:
                _meet(job, programs, waiting.pop(key))
                moved = True
        if not moved:
            raise InputError(_mismatch(programs, job.place))
    return job


def _key(node: RankOp) -> tuple[object, ...] | None:
    if node.collective is None:
        return None
    return node.collective.group, node.stream, node.collective.order


def _members(programs: Sequence[RankGraph]) -> dict[tuple[object, ...], set[int]]:
    """Ranks of each collective that was traced on more than one of them."""
    found: dict[tuple[object, ...], set[int]] = {}
    for rank, program in enumerate(programs):
        for node in program.nodes:
            if (key := _key(node)) is not None:
                found.setdefault(key, set()).add(rank)
    return {key: ranks for key, ranks in found.items() if len(ranks) > 1}


def _ready(
    place: list[int],
    program: RankGraph,
    members: Mapping[tuple[object, ...], set[int]],
    waiting: dict[tuple[object, ...], set[int]],
    rank: int,
) -> Iterator[RankOp]:
    """Nodes up to the next collective that other ranks take part in."""
    while len(place) < len(program.nodes):
        node = program.nodes[len(place)]
        key = _key(node)
        if key is not None and key in members:
            waiting.setdefault(key, set()).add(rank)
            return
        yield node


def _emit(job: JobGraph, rank: int, node: RankOp) -> int:
    return job.graph.add(
        node.name,
        phase=node.phase,
        resource=RESOURCES[node.phase],
        stream=node.stream,
        cost_ms=us(node.gap_us + node.cost_us),
        host_ms=us(node.host_us),
        deps=[Dep(job.place[rank][d]) for d in node.deps],
        blocks_host=node.blocks_host,
        thread=node.thread,
        ranks=(rank,),
        fills=_fills(node.event),
    )


def _fills(event: DeviceEvent | None) -> bool | None:
    """Copies have engines of their own; kernels compete for the multiprocessors."""
    if event is None or event.kind == "memcpy":
        return None
    return event.waves is not None and event.waves >= FILLING_WAVES


def _meet(job: JobGraph, programs: Sequence[RankGraph], ranks: set[int]) -> None:
    nodes = {rank: programs[rank].nodes[len(job.place[rank])] for rank in sorted(ranks)}
    first = next(iter(nodes.values()))
    deps = [job.place[rank][d] for rank, node in nodes.items() for d in node.deps]
    index = job.graph.add(
        first.name,
        phase=first.phase,
        resource=RESOURCES[first.phase],
        stream=first.stream,
        cost_ms=us(min(node.cost_us for node in nodes.values())),
        deps=deps,
        scope=tuple(nodes),
        thread=first.thread,
        ranks=tuple(nodes),
        fills=_fills(first.event),
    )
    for rank in nodes:
        job.place[rank].append(index)


def _mismatch(programs: Sequence[RankGraph], places: list[list[int]]) -> str:
    stuck = []
    for program, place in zip(programs, places, strict=True):
        if len(place) < len(program.nodes):
            node = program.nodes[len(place)]
            order = node.collective.order if node.collective else "?"
            stuck.append(
                f"rank {program.trace.rank} ({program.trace.source}): {node.name} #{order}"
            )
    return (
        "collectives of the ranks do not match; each rank waits at a different one: "
        + "; ".join(stuck)
    )
