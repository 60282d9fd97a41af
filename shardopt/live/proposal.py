"""A plan that would pay for a running job, as `shardopt plan --from` finds it, from a window of its
own data.

Why: docs/decisions/0066.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from predictor.model.plan import ShardingPlan
from predictor.model.workload import Feature, Workload
from search.in_use.in_place import find_obstacles
from search.in_use.plan import PlanInUse
from search.in_use.price import Move, MovePrice
from search.problem import Problem, Result
from search.solve import solve
from search.stop import Stop
from shardopt.api.answer import move_object
from shardopt.config.distributions import measured_distribution
from shardopt.npz import load_arrays
from shardopt.stats.result import FeatureStats, write_stats

MOST_BYTES = 2**26


@dataclass(frozen=True)
class Proposal:
    """What to run instead, and what it takes to get there.

    Args:
        before, plan: what runs, and what is proposed; the same plan if staying is best.
        move: between them.
        obstacles: why it cannot be made in place; empty if it can.
        new_bytes: that every rank needs beside what it holds, while both modules are there.
        measured_ms: median step of the window behind it.
        stats_file: of the window's ids, which a model file can name.
    """

    before: ShardingPlan
    plan: ShardingPlan
    result: Result
    move: Move
    obstacles: tuple[str, ...]
    new_bytes: tuple[int, ...]
    measured_ms: float
    stats_file: str

    @property
    def recommended(self) -> bool:
        """There is a move, and it pays for itself within the horizon."""
        return bool(self.move.tables)

    @property
    def in_place(self) -> bool:
        """TorchRec can make it while the job runs."""
        return self.recommended and not self.obstacles

    @property
    def gain(self) -> float:
        """Share of the step time that it is predicted to save."""
        given = self.result.in_use
        return 0.0 if given is None else 1 - self.result.best.iteration_ms / given.iteration_ms

    def to_object(self) -> dict[str, Any]:
        """As JSON: ``from`` and ``move`` of ``shardopt plan --json``, ``iteration_ms`` and
        ``lower_bound_ms``; and ``measured_ms``, ``gain`` and ``obstacles``."""
        return {
            "iteration_ms": self.result.best.iteration_ms,
            "lower_bound_ms": self.result.lower_bound_ms,
            **move_object(self.result, self.move, "the running plan"),
            "measured_ms": self.measured_ms,
            "gain": self.gain,
            "obstacles": list(self.obstacles),
        }


def find_proposal(
    problem: Problem, in_use: PlanInUse, stop: Stop, *, measured_ms: float, stats_file: str
) -> Proposal:
    """The plan that costs least over the horizon, moves included.

    Args:
        problem: of the window's data.
        in_use: what runs, under the workload's keys.
        measured_ms, stats_file: as `Proposal` has them.
    """
    result = solve(problem, stop, 0, top_k=1, in_use=in_use)
    price, after = MovePrice(problem, in_use.plan), result.best.plan
    move = price.of(after)
    return Proposal(
        in_use.plan,
        after,
        result,
        move,
        tuple(find_obstacles(price.tables, in_use.plan, after, move.tables)),
        tuple(int(size) for size in price.rebuilt_bytes(after)),
        measured_ms,
        stats_file,
    )


def observed_workload(
    workload: Workload, statistics: Sequence[FeatureStats], path: Path
) -> Workload:
    """The workload with the pooling factors and index distributions of a window.

    Args:
        statistics: features without ids, and those that nobody counted, stay as they are.
        path: the .npz file to write the window's statistics to.
    """
    seen = {found.name: found for found in statistics if found.seen is not None}
    write_stats(path, seen.values())
    arrays = load_arrays(path, MOST_BYTES)
    tables = []
    for table in workload.tables:
        features = [
            _observed(feature, seen[feature.name], arrays) if feature.name in seen else feature
            for feature in table.features
        ]
        tables.append(replace(table, features=tuple(features)))
    return replace(workload, tables=tuple(tables))


def _observed(feature: Feature, found: FeatureStats, arrays: Mapping[str, Any]) -> Feature:
    deviation = feature.pooling_factor_std
    if feature.num_poolings == 1:  # of several poolings a sample, only their sum was seen
        deviation = found.pooling_factor_std if found.varies else None
    return replace(
        feature,
        pooling_factor=found.pooling_factor / feature.num_poolings,
        pooling_factor_std=deviation,
        distribution=measured_distribution(arrays, feature.name),
    )
