"""The critical path as a reader follows it: neighbours of one phase and rank taken together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from predictor.iteration.critical_path import Segment


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
