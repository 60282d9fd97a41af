"""What a planner found, and the line that says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from predictor.model.memory.ranks import RankMemory
from predictor.model.plan import ShardingPlan
from predictor.predict import Prediction
from predictor.units import format_bytes
from search.problem import Problem, Result
from shardopt.extras import needs_torchrec
from shardopt.formatting import at_most, gap_of, interval, ms, plural, times
from shardopt.torchrec.logs import logger
from shardopt.torchrec.plan.options import TableKey, to_plan

with needs_torchrec():
    from torchrec.distributed.planner.types import ShardingOption

TORCHREC = "torchrec default"
"""Name of TorchRec's planner among the baselines of a search."""


@dataclass(frozen=True)
class LastSearch:
    """What the last `plan` found.

    Args:
        problem: the tables that shardopt predicts, the ranks with the memory left for them, costs.
        result: of the search; None where a plan was loaded, or TorchRec's is returned.
        plan: as it was returned, with what callbacks changed.
        prediction: of that plan.
        changed: keys of the tables that callbacks changed.
        left: tables that shardopt has no model for, and why; TorchRec placed them.
    """

    problem: Problem
    result: Result | None
    plan: ShardingPlan
    prediction: Prediction
    changed: tuple[str, ...] = ()
    left: Mapping[TableKey, str] = field(default_factory=dict)


def plan_of(options: list[ShardingOption], problem: Problem) -> ShardingPlan:
    """The plan that placed options are."""
    ranks = problem.topology
    return to_plan(options, problem.workload, ranks.world_size, ranks.local_world_size)


def describe(found: LastSearch) -> str:
    """One line: predicted time, gain over TorchRec's plan, gap, and what it rests on."""
    prediction, ranks = found.prediction, found.problem.topology.world_size
    parts = [
        f"predicted {ms(prediction.iteration_ms)} per iteration on {ranks} x "
        f"{found.problem.hardware.name} (90 %: {interval(prediction.interval_ms)} ms)"
    ]
    parts += _comparison(found)
    if found.left:
        parts.append(f"without {plural(len(found.left), 'table')} left to TorchRec")
    if found.changed:
        parts.append(f"callbacks changed {', '.join(found.changed)}")
    parts.append(f"constants: {prediction.provenance}")
    return "; ".join(parts)


def _comparison(found: LastSearch) -> list[str]:
    """With TorchRec's plan and with the bound, where a search has them."""
    if found.result is None:
        return ["not the plan of a search"]
    ours, theirs = found.prediction.iteration_ms, found.result.baselines.get(TORCHREC)
    parts = [
        "TorchRec's planner finds no plan that fits"
        if theirs is None
        else f"TorchRec's plan takes {ms(theirs)} ({times(theirs / ours)})"
    ]
    gap = gap_of(ours, found.result.lower_bound_ms)
    if gap is not None:
        parts.append(f"{at_most(gap)} from the best possible")
    return parts


def tell_short(memory: Sequence[RankMemory]) -> None:
    """Warn of a plan that does not fit by shardopt's count, though it was accepted."""
    short = [rank for rank in memory if not rank.fits]
    if not short:
        return
    worst = max(short, key=lambda rank: rank.missing_hbm_bytes + rank.missing_ddr_bytes)
    kind = "HBM" if worst.missing_hbm_bytes else "DDR"
    need, have = worst.use(kind)
    logger.warning(
        "by shardopt's count %s not fit: at its peak rank %d takes %s of %s %s",
        "1 rank does" if len(short) == 1 else f"{len(short)} ranks do",
        worst.rank,
        format_bytes(need),
        format_bytes(have),
        kind,
    )
