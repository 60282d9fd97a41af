"""Graphs for tests of the timeline: one operation at a time, or at random."""

from __future__ import annotations

import random

from predictor.iteration.graph import Dep, Graph


def add(graph: Graph, name: str, cost: object, stream: str = "compute", **more: object) -> int:
    return graph.add(  # type: ignore[arg-type]
        name, phase="host", resource="overheads", stream=stream, cost_ms=cost, **more
    )


def random_graph(seed: int, ranks: int = 4, *, identical: bool = False) -> Graph:
    pick = random.Random(seed)
    inline = frozenset({"host"}) | ({"compute"} if pick.random() < 0.3 else frozenset())
    graph = Graph(ranks, 2, inline, launch_latency_ms=pick.choice([0.0, 0.5]))
    for index in range(pick.randint(1, 12)):
        stream = pick.choice(["compute", "comm", "copy", "host"])
        costs = [pick.uniform(0, 10) for _ in range(ranks)]
        deps = [Dep(pick.randrange(index)) for _ in range(min(index, 2))]
        deps += [Dep(pick.randrange(index + 1), lag=pick.randint(1, 2))]
        add(
            graph,
            f"op{index}",
            costs[:1] * ranks if identical else costs,
            stream,
            host_ms=pick.choice([0.0, 0.2, 3.0]),
            kernels=pick.randint(1, 3),
            deps=deps,
            scope=pick.choice(["world", "intra", "cross"]) if stream == "comm" else None,
            blocks_host=pick.random() < 0.1,
        )
    return graph
