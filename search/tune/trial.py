"""Trial of one setting: ruled out by its bound, or searched briefly from the best plans so far."""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, FiniteFloat, InstanceOf, PlainSerializer

from predictor.errors import InfeasibleError
from predictor.model.plan import ShardingPlan
from predictor.model.plan_json import plan_from_dict, plan_to_dict
from predictor.units import format_bytes
from search.bound.lower_bound import LowerBound
from search.problem import Problem
from search.solve import solve
from search.space.enumerate import whole_space
from search.stop import Stop
from search.tune.goals import Goal, Values, covers, least_bytes, shard_bytes, values_of
from search.tune.knobs import Value

ROOT_STEPS = 20
"""Number of refinements of a trial's bound."""
WORTH = 0.01
"""Least fraction by which a setting must be able to beat the known ones to be searched."""
TRIED = ("searched", "ruled out", "infeasible")
"""States of trials whose setting needs no other trial."""


def pack_plan(plan: ShardingPlan | None) -> str | None:
    """Compress a plan for a trial, as MySQL takes no attribute of 64 KiB or more."""
    if plan is None:
        return None
    text = json.dumps(plan_to_dict(plan), separators=(",", ":"))
    return base64.b85encode(zlib.compress(text.encode(), 9)).decode("ascii")


def unpack_plan(packed: Any) -> Any:
    """Invert `pack_plan`; return anything but a text as it is."""
    if not isinstance(packed, str):
        return packed
    text = zlib.decompress(base64.b85decode(packed))
    return plan_from_dict(json.loads(text), where="a trial's plan")


Numbers = tuple[FiniteFloat, ...]
PackedPlan = Annotated[
    InstanceOf[ShardingPlan] | None, BeforeValidator(unpack_plan), PlainSerializer(pack_plan)
]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Outcome of a setting.

    Args:
        state: ``searched``, ``ruled out`` by its bound or ``infeasible``; of a trial also
            ``failed`` with its worker, or ``open``.
        values: of the goals, of the best plan found; None unless searched.
        bound: no plan of the setting has smaller values; None where none was computed.
        iteration_ms: of the best plan found; None unless searched.
        lower_bound_ms: no plan of the setting takes fewer ms; 0 unless searched.
        plan: the best plan found; None unless searched.
        reason: why it is infeasible.
        evaluations: plans that its search scored.
    """

    state: Literal["searched", "ruled out", "infeasible", "failed", "open"]
    values: Numbers | None = None
    bound: Numbers | None = None
    iteration_ms: FiniteFloat | None = None
    lower_bound_ms: FiniteFloat = 0.0
    plan: PackedPlan = None
    reason: str = ""
    evaluations: int = 0


@dataclass(frozen=True, kw_only=True)
class Trial(Outcome):
    """One setting that was tried."""

    number: int
    setting: Mapping[str, Value]


def try_setting(
    problem: Problem,
    goals: Sequence[Goal],
    known_values: Sequence[Values],
    warm: Sequence[ShardingPlan],
    stop: Stop,
    seed: int,
    searchers: Sequence[str],
) -> Outcome:
    """Search the plans of one setting unless its bound rules it out.

    The bound rules it out if a known plan is, in every goal, within `WORTH` of the bound.

    Args:
        known_values: values of known plans.
        warm: plans to start from too, where they still fit.
        stop: budget of the search.

    Raises:
        InfeasibleError: no plan fits, or not at its peak.
    """

    def rules_out(bound: Values) -> bool:
        nearly = tuple(value * (1 + WORTH) for value in bound)
        return any(covers(values, nearly) for values in known_values)

    root_ms, least = root_bound(
        problem, lambda ms, least: rules_out(values_of(goals, problem, ms, least))
    )
    bound = values_of(goals, problem, root_ms, least)
    if rules_out(bound):
        return Outcome(state="ruled out", bound=bound)
    # settings are compared by their fastest plans; the last search prefers one that ties
    result = solve(problem, stop, seed, top_k=1, searchers=searchers, starts=warm, tolerance=0.0)
    best = result.best
    return Outcome(
        state="searched",
        values=values_of(goals, problem, best.iteration_ms, shard_bytes(problem, best.plan)),
        bound=values_of(goals, problem, max(root_ms, result.lower_bound_ms), least),
        iteration_ms=best.iteration_ms,
        lower_bound_ms=result.lower_bound_ms,
        plan=best.plan,
        evaluations=result.evaluations,
    )


def root_bound(
    problem: Problem, enough: Callable[[float, float], bool] = lambda ms, least: False
) -> tuple[float, float]:
    """Return lower bounds of the ms, and of the bytes of shards on the fullest rank, of any plan.

    Args:
        enough: called with both after every step; True ends the refinement.

    The fullest rank holds at least the mean of the shards' bytes over the ranks. The bound covers
    the whole space, because the search falls back to it if nothing in the reduced one fits.

    Raises:
        InfeasibleError: the shards need more memory than all ranks have together.
    """
    space, topology = whole_space(problem), problem.topology
    hbm, ddr = least_bytes(space)
    caps = sum(topology.hbm_cap_bytes), sum(topology.ddr_cap_bytes)
    for need, cap, kind in zip((hbm, ddr), caps, ("HBM", "host memory"), strict=True):
        if need > cap:
            raise InfeasibleError(
                f"no plan fits: the tables need at least {format_bytes(need)} of {kind}, "
                f"{topology.world_size} ranks have {format_bytes(max(cap, 0))} left for them"
            )
    on_rank = (ddr if problem.hardware.device == "cpu" else hbm) / topology.world_size
    bound_ms = LowerBound(problem, space, problem.scorer).solve(
        ROOT_STEPS, stop=lambda ms: enough(ms, on_rank)
    )
    if not math.isfinite(bound_ms):
        raise InfeasibleError("no plan fits, not even with every table cut at will over the ranks")
    return bound_ms, on_rank
