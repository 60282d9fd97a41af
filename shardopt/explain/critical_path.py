"""The critical path as a reader follows it, and what the host spends its time on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from predictor.iteration.critical_path import Segment
from predictor.iteration.graph import Graph


@dataclass(frozen=True)
class PathSection:
    """Consecutive segments of the critical path of one phase on one rank.

    Args:
        start_ms, end_ms: from the start of the path.
        names: of the operations, in order of time.
    """

    phase: str
    rank: int
    start_ms: float
    end_ms: float
    names: tuple[str, ...]

    @property
    def duration_ms(self) -> float:
        """Length of the section."""
        return self.end_ms - self.start_ms


def path_sections(path: Sequence[Segment]) -> list[PathSection]:
    """The path with neighbours of one phase and rank joined."""
    found: list[PathSection] = []
    origin = path[0].start_ms if path else 0.0
    for segment in path:
        start, end = segment.start_ms - origin, segment.end_ms - origin
        last = found[-1] if found else None
        if last is not None and (last.phase, last.rank) == (segment.phase, segment.rank):
            names = (*last.names, segment.name)
            found[-1] = PathSection(last.phase, last.rank, last.start_ms, end, names)
        else:
            found.append(PathSection(segment.phase, segment.rank, start, end, (segment.name,)))
    return found


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
