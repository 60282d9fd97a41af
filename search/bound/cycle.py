"""One rank's operations as a compiled program whose critical cycles bound plans from below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from predictor.iteration.graph import Graph, Op
from predictor.iteration.steady_state import CompiledTimeline


def compile_rank(graph: Graph, optional: Sequence[bool]) -> tuple[CompiledTimeline, list[int]]:
    """Compile a graph some of whose operations are absent from some plans.

    An absent operation leaves its stream and its host as they were; its dependants wait for its
    dependencies instead (`predictor.iteration.program`). To bound both cases an optional operation
    is split in two that do not wait for each other: one on its stream, and one on a stream of its
    own with its dependencies and dependants.

    Args:
        optional: True for each operation that some plan does not have.

    Returns:
        The program, and for each of its operations the index of the one in the graph.
    """
    ops: list[Op] = []
    origin: list[int] = []
    place: list[int] = []
    for index, (op, is_optional) in enumerate(zip(graph.ops, optional, strict=True)):
        if is_optional:
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
