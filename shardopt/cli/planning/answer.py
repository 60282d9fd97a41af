"""The answer of ``shardopt plan``: from the cache, or from a search."""

from __future__ import annotations

from dataclasses import dataclass

from search.in_use.plan import PlanInUse
from search.problem import Result
from search.stop import Stop
from shardopt.api.cache import ResultCache, is_final
from shardopt.api.scenarios import ScenarioSource
from shardopt.api.setting import Setting
from shardopt.cli.output import note
from shardopt.explain.outcome import SearchOutcome, find_outcome


@dataclass(frozen=True)
class Budget:
    """How much is searched, by whom, and for what."""

    seed: int
    effort: float
    time_limit: float | None
    top_k: int
    searchers: tuple[str, ...]
    objective: str
    scenarios: ScenarioSource


def find_answer(
    setting: Setting,
    near: PlanInUse | None,
    budget: Budget,
    stop: Stop,
    *,
    cached: bool,
    progress: bool,
    quiet: bool,
) -> SearchOutcome:
    """The answer that the cache has for the same input, or that of a search."""
    whole: list[Result] = []

    def search() -> SearchOutcome:
        # the solvers are imported only once the input is known to be good, and to be new
        from search.solve import solve
        from shardopt.report.progress import SearchProgress

        with SearchProgress(on=progress) as shown:
            result = solve(
                setting.problem(),
                stop,
                budget.seed,
                top_k=budget.top_k,
                searchers=budget.searchers,
                in_use=near,
                aim=budget.objective,
                scenarios=budget.scenarios.of(setting.problem()),
                progress=shown,
            )
        whole.append(result)
        return find_outcome(setting, result, stop)

    def keep(made: SearchOutcome) -> bool:
        return is_final(made.result) and len(made.result.plans) == len(whole[0].plans)

    if not cached:
        return search()
    answer = ResultCache.of_user().recall((setting.problem(), near, budget), search, keep)
    if not whole:
        note(["the answer to the same input is kept; --no-cache searches again"], quiet=quiet)
    return answer
