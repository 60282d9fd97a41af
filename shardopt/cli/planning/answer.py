"""The answer of ``shardopt plan``: from the cache, or from a search."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from predictor.model.plan import ShardingPlan
from predictor.model.plan_check import model_mismatch
from predictor.model.plan_json import load_plan
from search.in_use.plan import PlanInUse
from search.problem import Result
from search.stop import Stop
from shardopt.api.cache import ResultCache, is_final
from shardopt.api.given_plans import fit_plan
from shardopt.api.request import HORIZON, PlanRequest
from shardopt.api.scenarios import ScenarioSource, read_scenarios
from shardopt.api.setting import Setting
from shardopt.cli.output import note, warn
from shardopt.cli.setting import resolve
from shardopt.explain.outcome import Findings, SearchOutcome, find_outcome


@dataclass(frozen=True)
class ReadInputs:
    """What the files of a request say.

    Args:
        in_use: the plan in use, as its file has it.
        near: the same as the search takes it.
    """

    setting: Setting
    in_use: ShardingPlan | None
    near: PlanInUse | None
    source: ScenarioSource


def prepare(request: PlanRequest) -> ReadInputs:
    """Read all files of a request.

    Raises:
        InputError: one cannot be read, or they do not fit together.
        ProfileError: there is no such hardware profile.
    """
    in_use = None if request.from_ is None else load_plan(request.from_)
    setting = resolve(
        Path(request.model), request.machine, in_use, strict=request.strict, stats=request.windows
    )
    source = read_scenarios(request.scenarios, setting.hardware, setting.windows)
    near = None
    if in_use is not None:
        fitting = fit_plan(in_use, setting, where=str(request.from_))
        doubt = model_mismatch(in_use, setting.workload)
        if doubt:
            warn(f"{request.from_}: {doubt}")
        horizon = request.horizon or HORIZON
        near = PlanInUse(fitting, request.max_moves, request.max_bytes, horizon)
    return ReadInputs(setting, in_use, near, source)


def find_answer(
    request: PlanRequest,
    ready: ReadInputs,
    stop: Stop,
    *,
    cached: bool,
    progress: bool,
    quiet: bool,
) -> SearchOutcome:
    """The answer that the cache has for the same input, or that of a search."""
    whole: list[Result] = []
    setting = ready.setting

    def search() -> SearchOutcome:
        # the solvers are imported only once the input is known to be good, and to be new
        from search.solve import solve
        from shardopt.report.progress import SearchProgress

        with SearchProgress(on=progress) as shown:
            result = solve(
                setting.problem(),
                stop,
                request.seed,
                top_k=request.top_k,
                searchers=request.searchers,
                in_use=ready.near,
                aim=request.objective,
                scenarios=ready.source.of(setting.problem()),
                progress=shown,
            )
        whole.append(result)
        return find_outcome(setting, result, stop)

    def keep(made: Findings) -> bool:
        return is_final(made.result) and len(made.result.plans) == len(whole[0].plans)

    if not cached:
        return search()
    budget = (request.seed, request.effort, request.time_limit, request.top_k, request.searchers)
    inputs = (setting.problem(), ready.near, budget, request.objective, ready.source)
    answer = ResultCache.of_user().recall(inputs, Findings, search, keep)
    if isinstance(answer, SearchOutcome):
        return answer
    note(["the answer to the same input is kept; --no-cache searches again"], quiet=quiet)
    predictions = (setting.predict(ranked.plan) for ranked in answer.result.plans)
    return SearchOutcome(**vars(answer), predictions=tuple(predictions))
