"""A request and all that its files say, settled before anything is searched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from predictor.model.plan import ShardingPlan
from predictor.model.plan_check import model_mismatch
from predictor.model.plan_json import load_plan
from predictor.units import gib
from search.problem import PlanInUse, Problem
from search.stop import Stop
from search.tune.advice import reserve_s
from shardopt.api.cache import code_digest, digest, solver_versions
from shardopt.api.given_plans import fit_plan
from shardopt.api.older_plan import adapt_plan, read_renamed
from shardopt.api.request import HORIZON, PlanRequest
from shardopt.api.scenarios import ScenarioSource, read_scenarios
from shardopt.api.setting import ModelRead, Setting, resolve

REPORTING, MOST_REPORTING = 0.2, 0.5
"""Shares of a time limit that are left to what follows the search: at least, and at most."""


@dataclass(frozen=True)
class Inputs:
    """A request and what its files say.

    Args:
        problem: for the search, but for the scenarios.
        options: further ones of `search.solve.solve`.
        head: what plan file and JSON begin with.
        made_by: all that makes the plan, for its file: the same inputs make the same bytes.
            ``settings``: `PlanRequest.settings`; ``inputs``: the SHA-256 of what was read, by what
            it is, so that files may lie anywhere; ``code``: of the three packages; ``versions``: of
            what the search runs on.
        in_use: the plan in use, as its file has it.
        doubts: what may be wrong with the plan in use.
    """

    request: PlanRequest
    setting: Setting
    scenarios: ScenarioSource
    problem: Problem
    options: Mapping[str, Any]
    head: Mapping[str, Any]
    made_by: Mapping[str, Any]
    in_use: ShardingPlan | None = None
    doubts: tuple[str, ...] = ()

    def with_setting(self, setting: Setting) -> Inputs:
        """The same request on other hardware."""
        problem = replace(self.problem, hardware=setting.hardware)
        return replace(self, setting=setting, problem=problem)


def read_inputs(request: PlanRequest, model: ModelRead | None = None) -> Inputs:
    """Read the files of a request.

    Args:
        model: the content of its model file, where that is read already.

    Raises:
        InputError: one cannot be read, or they do not fit together.
        ProfileError: there is no such hardware profile.
    """
    assert request.model is not None
    settings, windows, options = request.settings(), request.windows, request.search_options
    in_use = None if request.from_ is None else load_plan(request.from_)
    setting = resolve(model or request.model, request, in_use, windows, strict=request.strict)
    scenarios = read_scenarios(request.scenarios, setting.hardware, setting.windows)
    problem, head = replace(setting.problem(), aim=request.objective), setting.head(request.seed)
    contents, doubts = setting.digests(), list[str]()
    if in_use is not None:
        where, renamed = str(request.from_), read_renamed(request.renamed)
        older = adapt_plan(in_use, setting.workload, renamed, where=where)
        near = PlanInUse(
            fit_plan(older.plan, setting, where=where),
            request.max_moves,
            None if request.max_gib is None else gib(request.max_gib),
            request.horizon or HORIZON,
            held=older.held,
        )
        problem = replace(problem, in_use=near)
        doubts = [*filter(None, [model_mismatch(in_use, setting.workload)]), *older.notes]
        contents["plan in use"] = digest(in_use)
    made_by = {
        "settings": settings,
        "inputs": contents,
        "code": code_digest(),
        "versions": solver_versions(),
    }
    return Inputs(
        request, setting, scenarios, problem, options, head, made_by, in_use, tuple(doubts)
    )


def stop_of(inputs: Inputs, *, interruptible: bool = False, started: float | None = None) -> Stop:
    """The stopping rule of a request's search, which leaves time for the advice that follows."""
    limit = inputs.request.time_limit
    share = REPORTING
    if limit is not None:
        share = min(MOST_REPORTING, max(share, reserve_s(inputs.setting.case()) / limit))
    return Stop(
        inputs.request.effort, limit, interruptible=interruptible, reserve=share, started=started
    )
