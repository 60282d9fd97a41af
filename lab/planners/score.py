"""How many plans a second the predictor scores: what a search spends its time on."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from predictor.errors import InfeasibleError
from search.baselines.starting_plans import plan_baselines
from search.improve.local_search import LocalSearch
from search.objective import Assignment, Objective
from search.problem import Problem
from search.scenarios.scenario import DRAWS, ScenarioScorer, draw_scenarios
from search.space.enumerate import reduced_space
from search.space.option import Choice, Option
from search.surrogate import Surrogate
from shardopt.measure.sampling import Samples, interleave

PLANS = "random plans"
MOVES = "plans with one table or shard moved"
NEIGHBOURS = "neighbours in a local search"
SCENARIOS = f"random plans in all of {DRAWS} scenarios"

DESCENT = 2000
"""Evaluations that improve the plan whose neighbours are scored."""


@dataclass(frozen=True)
class Scores:
    """Seconds for ``count`` plans of each kind, by name."""

    count: int
    times: dict[str, Samples]

    def per_second(self, name: str) -> float:
        """Plans scored a second, by the median round."""
        return self.count / self.times[name].median_s

    @property
    def scenarios_cost(self) -> float:
        """Time of a plan in all scenarios over that of a plan."""
        return self.per_second(PLANS) / self.per_second(SCENARIOS)


def measure(problem: Problem, count: int, repeat: int, seed: int) -> Scores:
    """Time the scoring of random plans, alone and in scenarios, and of a good plan's neighbours.

    Loads of shards are computed once per problem, as in a search, and not timed. Neighbours in a
    local search are made and checked for memory within the time.

    Args:
        count: plans per round and kind.
        repeat: rounds, >= 1.
        seed: of the random plans and of the descent.

    Raises:
        InfeasibleError: no baseline fits, so that there is no plan to start from.
    """
    objective = Objective(problem, reduced_space(problem))
    surrogate = Surrogate(objective)
    search = LocalSearch(objective, surrogate, seed)
    pick = random.Random(seed)
    fitting = [p for p in plan_baselines(objective, surrogate, seed).values() if objective.fits(p)]
    if not fitting:
        raise InfeasibleError(
            "no baseline fits the memory; give the ranks more, or take more ranks",
            inputs=("hbm_gib", "gpus"),
        )
    times = objective.score(fitting)
    good, _ = search.improve(fitting[int(times.argmin())], DESCENT)
    plans = [_random_plan(objective, pick) for _ in range(count)]
    moves = [_moved(objective, good, pick) for _ in range(count)]

    scenarios = ScenarioScorer(objective, draw_scenarios(problem))

    def local_search() -> None:
        done = 0
        while done < count:
            part = list(islice(search.neighbours(good), count - done))
            objective.score_neighbours(good, part)
            done += len(part)

    kinds: dict[str, Callable[[], object]] = {
        PLANS: lambda: objective.score(plans),
        MOVES: lambda: objective.score_neighbours(good, moves),
        NEIGHBOURS: local_search,
        SCENARIOS: lambda: scenarios.score(plans),
    }
    for score in kinds.values():
        score()
    return Scores(count, interleave({name: _timed(run) for name, run in kinds.items()}, repeat))


def _timed(run: Callable[[], object]) -> Callable[[], float]:
    def seconds() -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return seconds


def _random_plan(objective: Objective, pick: random.Random) -> Assignment:
    """Any option on any ranks for every table."""
    return tuple(_anywhere(objective, options, pick) for options in objective.space.options)


def _anywhere(objective: Objective, options: Sequence[Option], pick: random.Random) -> Choice:
    option = pick.choice(options)
    legal = objective.legal(option)
    if legal.same_group:
        topology = objective.problem.topology
        host = topology.group_of(pick.choice(legal.units[0])[0])
        units = [[u for u in unit if topology.group_of(u[0]) == host] for unit in legal.units]
        return option, tuple(r for unit in units for r in pick.choice(unit))
    return option, tuple(r for unit in legal.units for r in pick.choice(unit))


def _moved(objective: Objective, base: Assignment, pick: random.Random) -> dict[int, Choice]:
    """One unit of a table on other ranks; of a table that lies everywhere, another option."""
    table = pick.randrange(len(base))
    option, ranks = base[table]
    legal = objective.legal(option)
    unit = pick.randrange(len(legal.units))
    start = sum(len(alternatives[0]) for alternatives in legal.units[:unit])
    there = pick.choice(legal.units[unit])
    moved = (*ranks[:start], *there, *ranks[start + len(there) :])
    if moved != ranks and option.is_legal(moved, objective.problem.topology):
        return {table: (option, moved)}
    return {table: _anywhere(objective, objective.space.options[table], pick)}
