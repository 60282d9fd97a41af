"""Stages of a search: each takes a state and returns a new one. `search.solve` has their order.

CP-SAT, whose import takes half a second, is imported where it is needed, which it seldom is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from predictor.errors import InfeasibleError
from predictor.model.memory.ranks import UVM_KERNELS
from predictor.model.plan import ComputeKernel, ShardingPlan
from search.baselines.starting_plans import plan_baselines
from search.bound.lower_bound import LowerBound
from search.candidate import Candidate
from search.choose import ChosenPlans, choose_plan
from search.in_use.align import rename_ranks
from search.in_use.plan import (
    candidates_in_use,
    finish_plan,
    lift_move_limit,
    rate_plan_in_use,
    space_near,
    space_of_bound,
)
from search.in_use.worth import prefer_worthwhile
from search.objective import Assignment, Objective
from search.prefer import no_host
from search.problem import NOMINAL, ROUNDING, Problem, RankedPlan, Result
from search.propose.annealed import propose_annealed
from search.propose.study import propose_by_study
from search.space.enumerate import whole_space
from search.space.filters import AMPLE, drop_uncached, drop_uvm, find_simplest
from search.space.host_memory import memory_notes
from search.space.option import Space
from search.state import State
from search.stop import Stop

GIVEN = "given start"


def list_spaces(problem: Problem, stop: Stop) -> list[Space]:
    """List the spaces to search, smallest first: device memory only, if the tables' bytes fit; host
    memory behind a cache; all options.

    Raises:
        InfeasibleError: a table has no option left.
    """
    try:
        whole = whole_space(problem, stop.check_start)
    except InfeasibleError as error:
        from search.infeasible import explain_infeasible

        raise explain_infeasible(problem, error, stop) from None
    cached = drop_uncached(whole)
    spaces = [whole]
    for narrower in (cached, drop_uvm(cached, problem.topology, 1.0)):
        if narrower.size < spaces[0].size:
            spaces.insert(0, narrower)
    return [space_near(space, problem) for space in spaces]


def with_baselines(state: State) -> State:
    """Add the plans of other methods. A plan outside the bounded space is shown, never chosen."""
    tools = state.tools
    state.show("baselines", 0.0)
    free = tools.objective.over(lift_move_limit(tools.objective.space))
    time_is_up = tools.stop.part(tools.params.baselines_time)
    plans = plan_baselines(free, tools.surrogate, tools.seed, time_is_up)
    times = tools.objective.score(list(plans.values())).tolist()
    baselines = tuple(
        Candidate(plan, ms, name) for (name, plan), ms in zip(plans.items(), times, strict=True)
    )
    usable = tuple(c for plan in baselines if (c := _in_space(tools.objective, plan)))
    return replace(state, baselines=baselines, usable=usable).adding(usable)


def _in_space(objective: Objective, candidate: Candidate) -> Candidate | None:
    """Return the candidate as a plan of the space, or None if it does not fit or lies outside.

    The simplest option replaces any other that puts the same bytes on the same ranks.
    """
    plan, space, topology = candidate.assignment, objective.space, objective.problem.topology
    options = [find_simplest(space, option, topology) for option, _ in plan]
    same: Assignment = tuple(
        (option, ranks[: option.num_shards])
        for option, (_, ranks) in zip(options, plan, strict=True)
        if option is not None
    )
    if len(same) < len(plan) or not objective.fits(same):
        return None
    if same == plan:
        return candidate
    ms = float(objective.score([same])[0])
    return Candidate(same, ms, f"{candidate.found_by}, simplified")


def with_plan_in_use(state: State) -> State:
    """Add the plan in use, if constraints allow it."""
    return state.adding(candidates_in_use(state.tools.objective))


def with_starts(state: State, plans: Sequence[ShardingPlan]) -> State:
    """Add given plans, such as those of another setting, if they are plans of the space."""
    objective = state.tools.objective
    starts = [a for plan in plans if (a := objective.assignment_of(plan)) is not None]
    times = objective.score(starts).tolist()
    given = [Candidate(start, ms, GIVEN) for start, ms in zip(starts, times, strict=True)]
    return replace(state, usable=(*state.usable, *given)).adding(given)


def with_bound(state: State) -> State:
    """Prove a first bound; its linear programs later propose plans."""
    tools = state.tools
    if _no_moves_allowed(state) or tools.stop.reached():
        return state
    # in a large problem listing the bound's choices takes about as long as everything before it;
    # without a plan it is worth it, as all plans then come from the bound
    late = tools.stop.remaining_s < tools.stop.elapsed_s
    if tools.is_large and late and state.incumbents:
        return state
    state.show("lower bound", 0.05)
    time_is_up = tools.stop.part(tools.params.bound_time)
    try:
        proven = tools.bound.solve(tools.params.bound_steps, state.best_ms, time_is_up)
    except KeyboardInterrupt:
        if not state.incumbents:
            raise
        tools.stop.interrupt()
        return state
    return replace(state, proven_ms=proven)


def with_proposals(state: State, searchers: Sequence[str]) -> State:
    """Add the plans of each searcher: ``annealing``, ``cpsat``, ``optuna``."""
    for name, (propose, stage, fraction) in PROPOSERS.items():
        if name in searchers and not _no_moves_allowed(state) and not state.tools.stop.reached():
            state.show(stage, fraction)
            candidates = _until_interrupted(state, propose(state), stage, fraction)
            state = state.adding(candidates)
    return state


def _until_interrupted(
    state: State, candidates: Iterable[Candidate], stage: str, fraction: float
) -> Iterator[Candidate]:
    """Yield candidates until Ctrl-C comes.

    Raises:
        KeyboardInterrupt: it came before any plan was found, or twice.
    """
    tools, best_ms = state.tools, state.best_ms
    try:
        for candidate in candidates:
            best_ms = min(best_ms, candidate.iteration_ms)
            tools.progress(stage, fraction, best_ms, state.proven_ms or None)
            yield candidate
    except KeyboardInterrupt:
        if best_ms == math.inf:
            raise
        tools.stop.interrupt()


def _no_moves_allowed(state: State) -> bool:
    """Return True if no table may move from the plan in use."""
    limit = state.tools.objective.space.in_use
    return limit is not None and limit.max_moves == 0


def with_any_plan(state: State) -> State:
    """Add any plan that fits if there is no incumbent yet."""
    if state.incumbents:
        return state
    from search.propose.rescue import rescue

    candidates, nearest = rescue(state.tools)
    return replace(state, nearest=nearest).adding(candidates)


def first_with_plans(states: Iterable[State]) -> State:
    """Return the first state that has a plan.

    Raises:
        InfeasibleError: none has one.
    """
    last: State | None = None
    for state in states:
        if state.incumbents:
            return state
        last = state
    assert last is not None
    assert last.nearest is not None
    from search.infeasible import explain_no_plan

    tools = last.tools
    raise explain_no_plan(tools.objective, last.nearest, tools.params, tools.stop, tools.seed)


def with_host_memory(state: State, whole: Space, explore: Callable[[Space], State]) -> State:
    """Try more tables in host memory, or host memory without a cache.

    Return the state of that larger space if its best plan is faster by more than the stated error
    of lookups, else the given state with a note. The larger space is skipped where device memory is
    ample or a search takes long. A plan that wins only because the host launches less is rejected:
    its devices have more to do.

    Args:
        whole: the space with all options.
        explore: searches a space.
    """
    tools = state.tools
    problem, stop, space = tools.problem, tools.stop, tools.objective.space
    error = problem.hardware.embedding.rel_error
    best_ms, enough_ms = state.best_ms, state.best_ms / (1 + error)
    larger = drop_uvm(whole, problem.topology, AMPLE)
    if whole is space or larger.size == space.size:
        return state
    cached = space.size == drop_uncached(larger).size
    where = "in host memory " + ("without a cache" if cached else "(UVM kernels)")

    def left_out(why: str) -> State:
        text = f"Neither search nor bound covers plans with tables {where}: {why}"
        return replace(state, notes=(text,))

    if tools.is_large or stop.remaining_s <= 0:
        return left_out("they were not tried, since a plan fits without them")
    time_is_up = stop.part(tools.params.bound_time)
    bound = LowerBound(problem, space_of_bound(larger), problem.scorer)
    bound_ms = bound.solve(
        tools.params.bound_steps, best_ms, lambda ms: ms >= enough_ms or time_is_up()
    )
    if bound_ms >= enough_ms:
        return left_out(f"none is faster by more than the stated error of lookups ({error:.0%})")
    other = explore(larger)
    if other.best_ms >= enough_ms:
        return left_out(
            "no plan was found that is faster by more than the stated error of lookups "
            f"({error:.0%})"
        )
    if cached and _devices_ms(other) > _devices_ms(state):
        return left_out(
            f"the best takes {other.best_ms:.4g} ms, but only because the host launches less; its "
            "devices have more to do"
        )
    kernels = (ComputeKernel.FUSED_UVM,) if cached else UVM_KERNELS
    tables = sum(option.compute_kernel in kernels for option, _ in other.incumbents[0].assignment)
    text = (
        f"{tables} tables are {where}, whose kernels are not validated: the plan is "
        f"{best_ms / other.best_ms - 1:.0%} faster than the best plan without, more "
        f"than the stated error of lookups ({error:.0%})"
    )
    return replace(other, notes=(text,))


def _devices_ms(state: State) -> float:
    """Return the iteration time of the fastest plan with a host that takes no time."""
    alone = state.tools.objective.under(no_host())
    return float(alone([state.incumbents[0].assignment])[0, 0])


def choose(state: State, tolerance: float | None) -> ChosenPlans:
    """Return the plans with the preferred one first, by the tie rules or over the scenarios."""
    tools, ranked = state.tools, list(state.incumbents)
    objective, params, stop, problem = tools.objective, tools.params, tools.stop, tools.problem
    near = objective.space.in_use
    share = params.tie if tolerance is None else tolerance
    ties = share > 0 and near is None
    over = problem.aim != NOMINAL and (near is None or near.max_moves > 0)
    in_time = stop.remaining_s > params.baselines_time * (stop.time_limit_s or 0.0)
    if in_time and (ties or over):
        state.show("choice", 0.7)
        # a plan slower than a baseline does not tie
        limits = [c.iteration_ms * (1 + min(share, ROUNDING)) for c in state.usable]
        limit_ms = max(state.best_ms, min([state.best_ms * (1 + share), *limits]))
        try:
            return choose_plan(objective, tools.surrogate, ranked, limit_ms, share, params, stop)
        except KeyboardInterrupt:
            stop.interrupt()
    return ChosenPlans(ranked, None, ())


def near_in_use(state: State, chosen: ChosenPlans, top_k: int) -> ChosenPlans:
    """Return the best chosen plans, with ranks renumbered so that the least moves away from the
    plan in use, and without moves that do not pay for themselves."""
    objective, in_use = state.tools.objective, state.tools.problem.in_use
    ranked = [rename_ranks(objective, c) for c in chosen.ranked[:top_k]]
    if in_use is not None and in_use.horizon is not None and not chosen.scenarios:
        ranked = prefer_worthwhile(objective, ranked, state.tools.params.tie)
    return replace(chosen, ranked=ranked[:top_k])


def with_full_bound(state: State) -> State:
    """Tighten the bound towards the fastest plan; after Ctrl-C keep the bound proven so far.

    If time was up before the bound of a large problem began, nothing is proven, and a note says so:
    listing what the bound chooses from takes seconds (4 for 1000 tables on 128 ranks).
    """
    tools, best_ms = state.tools, state.best_ms
    bound, stop, params = tools.bound, tools.stop, tools.params
    state.show("lower bound", 0.8)
    if stop.remaining_s <= 0 and tools.is_large and not bound.has_begun:
        return replace(state, proven_ms=0.0, notes=(*state.notes, NO_BOUND))
    try:
        proven = bound.tighten(
            0 if stop.is_interrupted else params.bound_steps,
            best_ms,
            lambda proven_ms: stop.reached(best_ms, proven_ms),
            lambda: stop.remaining_s,
        )
    except KeyboardInterrupt:
        stop.interrupt()
        proven = bound.solve(0, best_ms)
    return replace(state, proven_ms=proven)


def result_of(state: State, chosen: ChosenPlans) -> Result:
    """Assemble the result from the state and the chosen plans."""
    tools = state.tools
    objective, problem, stop = tools.objective, tools.problem, tools.stop

    def finished(c: Candidate) -> RankedPlan:
        return RankedPlan(finish_plan(objective, c.assignment), c.iteration_ms, c.found_by)

    fastest, best_ms = state.incumbents[0], chosen.ranked[0].iteration_ms
    best = finished(chosen.ranked[0])
    notes = (*memory_notes(problem, best.plan), *state.notes, *tools.bound.notes(best_ms))
    tools.progress("done", 1.0, best_ms, state.proven_ms)
    return Result(
        plans=(best, *map(finished, chosen.ranked[1:])),
        lower_bound_ms=state.proven_ms,
        stopped_by=stop.stopped_by(state.best_ms, state.proven_ms),
        baselines={c.found_by: c.iteration_ms for c in state.baselines},
        baseline_plans={c.found_by: objective.sharding_plan(c.assignment) for c in state.baselines},
        search_seconds=stop.elapsed_s,
        evaluations=objective.evaluations,
        seed=tools.seed,
        in_use=rate_plan_in_use(objective),
        fastest=finished(fastest) if fastest.iteration_ms * (1 + ROUNDING) < best_ms else None,
        bound_notes=notes,
        aim=problem.aim,
        ties=chosen.ties,
        scenarios=chosen.scenarios,
        passed_over=chosen.passed_over,
    )


def _propose_by_cpsat(state: State) -> Iterable[Candidate]:
    from search.propose.cpsat import propose_by_cpsat

    return propose_by_cpsat(state)


NO_BOUND = "The time limit was up before the bound began; a longer one proves a bound"

PROPOSERS: Mapping[str, tuple[Callable[[State], Iterable[Candidate]], str, float]] = {
    "annealing": (propose_annealed, "annealing", 0.2),
    "cpsat": (_propose_by_cpsat, "CP-SAT", 0.5),
    "optuna": (propose_by_study, "Optuna study", 0.6),
}
"""Searcher -> function that proposes plans, stage name, fraction of the work done before it."""
