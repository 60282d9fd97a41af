"""One rank's operations as a compiled program whose critical cycles bound plans from below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from predictor.iteration.graph import Graph, Op
from predictor.iteration.steady_state import CompiledTimeline


def compile_rank(graph: Graph, gone: Sequence[bool]) -> tuple[CompiledTimeline, list[int]]:
    """The program of a graph, of which plans may do without those operations that are ``gone``; and
    which operation each of the program's stands for.

    Without an operation its stream and its host go on as they were, and what depends on it waits
    for what it would have waited for (`predictor.iteration.program`). With it, either takes its
    time. So it becomes two, neither of which waits for what the other does: one on its stream, and
    one on its own, which has its dependencies and its dependants.
    """
    ops: list[Op] = []
    origin: list[int] = []
    place: list[int] = []
    for index, (op, without) in enumerate(zip(graph.ops, gone, strict=True)):
        if without:
            alone = f"{op.name} {index} alone"
            bare = replace(op, host_ms=0.0, kernels=1, blocks_host=False, cost_ms=np.zeros((1, 1)))
            ops += [replace(bare, deps=()), replace(bare, stream=alone, thread="alone")]
        else:
            ops.append(op)
        origin += [index] * (len(ops) - len(origin))
        place.append(len(ops) - 1)
    moved = [
        replace(op, deps=tuple(replace(dep, op=place[dep.op]) for dep in op.deps)) for op in ops
    ]
    return CompiledTimeline(replace(graph, ops=moved), whole=True), origin
