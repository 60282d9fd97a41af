"""Goals of tuning: time, memory or GPU-hours, all comparable between settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from predictor.model.memory import peak
from predictor.model.plan import ShardingPlan
from search.problem import Problem
from search.space.option import Space

MS_PER_HOUR = 3.6e6


@dataclass(frozen=True)
class Goal:
    """One objective, smaller is better.

    Args:
        unit: of its values.
        of: problem, iteration time in ms, bytes of shards on the fullest rank -> value. Never
            decreases when time or bytes grow.
    """

    name: str
    unit: str
    of: Callable[[Problem, float, float], float]


def _time(problem: Problem, iteration_ms: float, shard_bytes: float) -> float:
    samples = problem.workload.batch_size * problem.topology.whole.world_size
    return 1000 * iteration_ms / samples


def _memory(problem: Problem, iteration_ms: float, shard_bytes: float) -> float:
    return shard_bytes + peak.least_bytes(problem.workload, problem.hardware.device)


def _gpu_hours(problem: Problem, iteration_ms: float, shard_bytes: float) -> float:
    return 1e9 * iteration_ms / problem.workload.batch_size / MS_PER_HOUR


GOALS: dict[str, Goal] = {
    goal.name: goal
    for goal in (
        Goal("time", "ms per 1000 samples", _time),
        Goal("memory", "bytes on the fullest rank", _memory),
        Goal("gpu_hours", "GPU-hours per 10^9 samples", _gpu_hours),
    )
}

Values = tuple[float, ...]


def values_of(
    goals: Sequence[Goal], problem: Problem, iteration_ms: float, shard_bytes: float
) -> Values:
    """Return the value of every goal."""
    return tuple(goal.of(problem, iteration_ms, shard_bytes) for goal in goals)


def shard_bytes(problem: Problem, plan: ShardingPlan) -> int:
    """Return the bytes that shards and lookups add to the peak of the fullest rank.

    They are device memory, or host memory on CPUs.
    """
    reserved = max(rank.reserved_bytes for rank in problem.peaks.peaks(plan))
    return reserved - peak.least_bytes(problem.workload, problem.hardware.device)


def least_bytes(space: Space) -> tuple[int, int]:
    """Return the least HBM and host memory that the shards of any plan take, over all ranks."""
    hbm = sum(min(sum(m.hbm_bytes for m in o.memory) for o in t) for t in space.options)
    ddr = sum(min(sum(m.ddr_bytes for m in o.memory) for o in t) for t in space.options)
    return hbm, ddr


def covers(better: Values, worse: Values) -> bool:
    """Return True if the first values are at least as good in every goal."""
    return all(a <= b for a, b in zip(better, worse, strict=True))


def pareto_front(points: Sequence[Values]) -> list[int]:
    """Return the indices of the points that no other beats, in order; the first of equal points."""
    front = []
    for i, point in enumerate(points):
        beaten = any(
            covers(other, point) and (other != point or j < i)
            for j, other in enumerate(points)
            if j != i
        )
        if not beaten:
            front.append(i)
    return front
