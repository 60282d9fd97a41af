"""What the host spends its time on: issuing the work of each phase."""

from __future__ import annotations

import numpy as np

from predictor.iteration.graph import Graph


def host_work(graph: Graph) -> dict[str, float]:
    """ms per iteration that the host takes for each phase, the longest first.

    Of the rank whose host does most; the graph is of one plan.
    """
    by_phase: dict[str, np.ndarray] = {}
    for op in graph.ops:
        gone = op.absent(graph.world_size)
        there = 1.0 if gone is None else 1.0 - np.broadcast_to(gone[0], graph.world_size)
        spent = by_phase.setdefault(op.phase, np.zeros(graph.world_size))
        spent += op.host_ms * there
    if not by_phase:
        return {}
    rank = int(sum(by_phase.values(), np.zeros(graph.world_size)).argmax())
    found = {phase: float(spent[rank]) for phase, spent in by_phase.items() if spent[rank] > 0}
    return dict(sorted(found.items(), key=lambda item: -item[1]))
