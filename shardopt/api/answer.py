"""From a request to an answer: read the inputs, search, predict, and give advice.

`plan` does all of it. Console, JSON, plan file and replay are made from the `Answer` it returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from predictor.cost.loads import ShardLoads
from predictor.errors import InfeasibleError
from predictor.model.dense_settings import ComputedDense
from predictor.model.plan import ShardingPlan
from predictor.model.plan_json import plan_text, plan_to_dict
from predictor.predict import Prediction
from search.baselines.starting_plans import TORCHREC, first_plan
from search.constraint_costs import ConstraintCosts, price_constraints
from search.expected_gain import (
    ExpectedGain,
    Stakes,
    expected_gain,
    gain_over_baseline,
    stakes,
)
from search.in_use.price import Move, MovePrice
from search.params import SearchParams
from search.prefer import TOLERANCE
from search.problem import (
    NOMINAL,
    REGRET,
    ROUNDING,
    Problem,
    Progress,
    RankedPlan,
    Result,
    silent,
)
from search.stop import Stop
from search.tune.advice import Advised, Advisor
from shardopt.api.cache import ResultCache
from shardopt.api.document import (
    AdviceAnswer,
    FoundPlan,
    PlanAnswer,
    advice_keys,
    confirmation_keys,
    constraint_keys,
    move_keys,
)
from shardopt.api.given_plans import broken
from shardopt.api.inputs import Inputs, read_inputs, stop_of
from shardopt.api.request import MADE, SEARCHERS, PlanRequest
from shardopt.api.scenarios import ScenarioSource
from shardopt.api.setting import Setting, resolve
from shardopt.config.model import load_model
from shardopt.config.write import apply_changes
from shardopt.explain.deciding import DecidingConstant, deciding_constants, known_plans
from shardopt.explain.host import host_bound
from shardopt.explain.networks import NetworkPart, network_part
from shardopt.formatting import at_most, gap_of, ms, percent, points
from shardopt.race import Confirmation

TOP_K = 3
FOLLOW_UP = 2.0
"""Time of each step after the predictions, as a multiple of one prediction's: for 2000 tables on
256 GPUs, 1.9 for the deciding constants and 1.3 for the network."""
FREE_EFFORT, FREE_RESERVE = 0.3, 0.5
"""Search without constraints: its effort as a share of the main search's, and the share of the
remaining time that it must leave."""
CUT = ("interrupted", "time")
"""Reasons to stop after which another run may give another plan; the plan file records them."""


@dataclass(frozen=True)
class Answer:
    """Plans that a search found, with predictions, gains and advice.

    Args:
        result: result of the search, cut to the plans that were predicted.
        predictions: predictions of ``result.plans``, in the same order.
        move: price of the move from the plan in use to the best plan; None without a plan in use.
        gain: expected gain of the best plan over TorchRec's; None if TorchRec's planner has none.
        stakes: how much the choice of a plan matters; None if too little was compared.
        advised: advice on changes besides the plan; None if not requested, or without time.
        constraint_costs: cost of the model's constraints; None if they cost nothing, or if not
            requested.
        deciding: constants whose stated error could make another plan the fastest.
        network: share of the network between hosts in the best plan; None on one host.
        head: first keys of plan file and JSON.
        from_cache: True if the result is cached and no search was run.
        confirmation: measurements of the plans, of which the first is then the fastest measured.
    """

    setting: Setting
    result: Result
    predictions: tuple[Prediction, ...]
    head: Mapping[str, Any]
    move: Move | None = None
    gain: ExpectedGain | None = None
    stakes: Stakes | None = None
    advised: Advised | None = None
    constraint_costs: ConstraintCosts | None = None
    deciding: tuple[DecidingConstant, ...] = ()
    network: NetworkPart | None = None
    from_cache: bool = field(default=False, compare=False)
    confirmation: Confirmation | None = None

    @property
    def best(self) -> Prediction:
        """Prediction of the best plan."""
        return self.predictions[0]

    @property
    def verdict(self) -> str:
        """Recommendation in a sentence."""
        gain, stakes, in_use = self.gain, self.stakes, self.result.in_use
        if self.confirmation is not None:
            return self.confirmation.verdict
        if in_use is not None and self.move is not None:
            saved = percent(max(0.0, 1 - self.result.best.iteration_ms / in_use.iteration_ms))
            if not self.move.tables:
                return "Keep the plan in use: nothing better within the limits pays for its move."
            return f"Move to plan 1: it gains {saved} over the plan in use."
        if stakes is not None and not stakes.matters:
            free = self.constraint_costs is None
            where = "here; see the advice" if free else "within these constraints"
            return (
                f"Sharding hardly matters {where}: {stakes.plans} reasonable plans differ by "
                f"{at_most(stakes.spread)}, too little to be told apart."
            )
        if gain is None:
            return f"Use plan 1: {ms(self.best.iteration_ms)} per iteration."
        low, high = gain.interval
        # as many digits as its interval, so that it lies in it
        words = f"{points(gain.mean).lstrip('+')} % ({points(low)} to {points(high)})"
        if gain.verdict == "use":
            return f"Use plan 1: it gains {words} over TorchRec's plan."
        if gain.verdict == "measure" and gain.mean > 0:
            return f"Plan 1 may gain {words} over TorchRec's plan: only a measurement tells."
        if gain.verdict == "measure":
            return (
                f"Plan 1 is predicted to gain {percent(gain.nominal)} over TorchRec's plan, but "
                f"{words} on average over the errors of all costs: only a measurement tells."
            )
        best = self.result.best.plan
        if best.tables != self.result.baseline_plans.get(TORCHREC, best).tables:
            time = ms(self.best.iteration_ms)
            return f"Use plan 1: {time} per iteration; it gains {words} over TorchRec's plan."
        if gain.nominal <= ROUNDING:
            return "Keep TorchRec's plan: no plan was found that is predicted to be faster."
        return (
            f"Keep TorchRec's plan: the best other plan gains {words}, and a gain counts when its "
            f"interval is above {percent(TOLERANCE)}."
        )

    @property
    def is_interrupted(self) -> bool:
        """True if the user ended the search or the measurement."""
        measured = self.confirmation is not None and self.confirmation.interrupted
        return measured or self.result.stopped_by == "interrupted"

    def plan_text(self) -> str:
        """Return the text of the best plan's file."""
        return _plan_file(self.result.best.plan, self.file_head)

    def document(self, in_use: Path | None = None) -> PlanAnswer:
        """Return the answer in the form of the console and JSON.

        Args:
            in_use: path of the plan in use, as given.
        """
        result, best, dense = self.result, self.best, self.setting.workload.dense
        regret = result.aim == REGRET and result.passed_over is not None
        keys = {
            "setting": self.setting,
            "gap": gap_of(best.iteration_ms, result.lower_bound_ms),
            "surrogate_gap": None,
            "plans": [
                FoundPlan.of(p.plan, prediction, found_by=p.found_by, tables=p.plan)
                for p, prediction in zip(result.plans, self.predictions, strict=True)
            ],
            "expected_gain": self.gain,
            "sharding_matters": self.stakes is None or self.stakes.matters,
            "verdict": self.verdict,
            "host_bound": host_bound(
                best,
                self.setting.hardware,
                cuda_graphs=isinstance(dense, ComputedDense) and dense.cuda_graphs,
            ),
            "preferred_to": result.fastest,
            "objective": result.aim,
            "worst_regret": result.worst_regret,
            "proved_regret": result.proved_regret,
            "passed_over": (result.passed_over or 0.0) - 1 if regret else result.passed_over,
            "notes": self.setting.notes,
            "deciding": self.deciding,
            "between_hosts": self.network,
            "torchrecs": result.baseline_plans.get(TORCHREC),
            **advice_keys(self.advised),
            **constraint_keys(self.constraint_costs),
            **move_keys(result, self.move, in_use),
            **confirmation_keys(self.confirmation),
        }
        return PlanAnswer.model_validate({**self.head, **vars(result), **vars(best), **keys})

    def advice_document(self) -> AdviceAnswer:
        """Return the advice alone, in the form of the console and JSON."""
        keys = {"setting": self.setting, **advice_keys(self.advised)}
        return AdviceAnswer.model_validate({**self.head, **vars(self.result.best), **keys})

    @property
    def file_head(self) -> dict[str, Any]:
        """Keys of the best plan's file other than its tables."""
        result = self.result
        cut = {"stopped_by": result.stopped_by} if result.stopped_by in CUT else {}
        times = {"iteration_ms": self.best.iteration_ms, "lower_bound_ms": result.lower_bound_ms}
        return {**self.head, **times, **cut}


def plan(request: PlanRequest, *, cache: ResultCache | None = None) -> Answer:
    """Search the best plans for a request, and add advice.

    Args:
        cache: cache of results; None to search in any case.

    Raises:
        InputError: a file cannot be used, or an option is out of range.
        ProfileError: the hardware profile does not exist.
        InfeasibleError: no plan fits.
    """
    request.check()
    inputs = read_inputs(request)
    stop = stop_of(inputs)
    return followed_up(find_answer(inputs, stop, cache), stop)


def _with_first(
    setting: Setting, result: Result, predictions: list[Prediction], first: RankedPlan
) -> tuple[Result, list[Prediction]]:
    """Return the result with another plan first, and the predictions in its order."""
    others = [
        pair
        for pair in zip(result.plans, predictions, strict=True)
        if pair[0].plan.tables != first.plan.tables
    ]
    pairs = [(first, setting.predict(first.plan)), *others][: len(predictions)]
    plans, predicted = zip(*pairs, strict=True)
    faster = result.fastest or result.best
    fastest = faster if faster.iteration_ms * (1 + ROUNDING) < first.iteration_ms else None
    # ties and scenarios belong to the plan that was first before
    result = replace(result, plans=plans, fastest=fastest, ties=None, scenarios=())
    return result, list(predicted)


def _beside_torchrecs(
    setting: Setting,
    problem: Problem,
    result: Result,
    predictions: list[Prediction],
    gain: ExpectedGain,
    *,
    ties_given: bool,
) -> tuple[Result, list[Prediction], ExpectedGain]:
    """Return the result, predictions and gain where the preferred plan is no reason to leave
    TorchRec's: the fastest plan comes first if it is one, else TorchRec's, if that can be used.

    Args:
        gain: of the preferred plan; the gain that is returned is that of the fastest one.
        ties_given: the user says what ties, so the preferred plan stands for the fastest one.
    """
    plan = result.baseline_plans[TORCHREC]
    if result.fastest is not None and not ties_given:
        gain = expected_gain(problem, result.fastest.plan, plan, TORCHREC)
        if gain.verdict != "keep":
            return *_with_first(setting, result, predictions, result.fastest), gain
    if broken(plan, setting) or not problem.fits(plan):
        return result, predictions, gain
    torchrecs = RankedPlan(plan, result.baselines[TORCHREC], TORCHREC)
    return *_with_first(setting, result, predictions, torchrecs), gain


def find_answer(
    inputs: Inputs,
    stop: Stop,
    cache: ResultCache | None,
    progress: Progress = silent,
) -> Answer:
    """Return the answer to a request whose files have been read.

    Args:
        stop: limits of the search; later steps are skipped if no time is left.
    """
    seed, options = inputs.request.seed, inputs.options
    result, from_cache = find_plans(
        inputs.problem, stop, seed, inputs.scenarios, cache, progress=progress, **options
    )
    head = {**inputs.head, MADE: inputs.made_by}
    ties_given = inputs.request.tie is not None
    answer = answer_of(inputs.setting, result, head, stop, ties_given=ties_given)
    return replace(answer, from_cache=from_cache)


def find_plans(
    problem: Problem,
    stop: Stop,
    seed: int,
    scenarios: ScenarioSource,
    cache: ResultCache | None,
    *,
    progress: Progress = silent,
    **options: Any,
) -> tuple[Result, bool]:
    """Return the cached result for the same input, else search; and True if it was cached.

    Args:
        options: further options of `search.solve.solve`.
    """
    options = {"searchers": SEARCHERS, **options}

    def search() -> Result:
        # the solvers are imported only for input that is valid and not cached
        from search.solve import solve

        varied = replace(problem, scenarios=scenarios.of(problem))
        return solve(varied, stop, seed, progress=progress, **options)

    if cache is None:
        return search(), False
    return cache.recall((problem, stop.effort, seed, options, scenarios), search)


def answer_of(
    setting: Setting,
    result: Result,
    head: Mapping[str, Any],
    stop: Stop | None = None,
    *,
    ties_given: bool = False,
) -> Answer:
    """Return the answer of a search: the best plan, and as many others as there is time to predict.

    Each further step is skipped unless there is time for it, measured in predictions.

    Args:
        ties_given: the user says how much slower a preferred plan may be.
    """
    stop = stop or Stop()
    problem = setting.problem()
    shards = ShardLoads(problem.workload, problem.topology, problem.hardware)
    problem = replace(problem, loads=shards)  # shared by all steps below
    predictions: list[Prediction] = []
    last_s = 0.0

    def is_time_for(count: float) -> bool:
        return count * last_s <= stop.left_s

    for ranked in result.plans:
        if predictions and not is_time_for(1):
            break
        before_s = stop.elapsed_s
        predictions.append(setting.predict(ranked.plan, shards))
        last_s = stop.elapsed_s - before_s
    result = replace(result, plans=result.plans[: len(predictions)])
    gain = gain_over_baseline(problem, result) if is_time_for(FOLLOW_UP) else None
    alone = result.in_use is None and result.aim == NOMINAL
    if gain is not None and alone and gain.verdict == "keep":
        result, predictions, gain = _beside_torchrecs(
            setting, problem, result, predictions, gain, ties_given=ties_given
        )
    move = None
    if result.in_use is not None:
        move = MovePrice(problem, result.in_use.plan, result.in_use.held).of(result.best.plan)
    answer = Answer(setting, result, tuple(predictions), head, move, gain)
    if is_time_for(FOLLOW_UP) and result.stopped_by not in CUT:
        answer = replace(answer, stakes=stakes(problem, result))
    if is_time_for(FOLLOW_UP):
        constants = deciding_constants(problem, result.best.plan, known_plans(result))
        answer = replace(answer, deciding=tuple(constants))
    if is_time_for(FOLLOW_UP):
        named, best = setting.network is not None, result.best.plan
        answer = replace(answer, network=network_part(problem, best, predictions[0], named=named))
    return answer


def advise_only(inputs: Inputs, stop: Stop) -> Answer:
    """Return advice for the plan of the best baseline; without a search nothing is proved.

    Raises:
        InfeasibleError: no baseline fits.
    """
    setting, seed = inputs.setting, inputs.request.seed
    first = first_plan(setting.problem(), seed, lambda: stop.remaining_s <= 0)
    if first is None:
        raise InfeasibleError(
            "no plan of TorchRec's planner or of a simple rule fits, so there is no plan to advise "
            "on; leave out --advice-only to search for one"
        )
    prediction = setting.predict(first.plan)
    first = replace(first, iteration_ms=prediction.iteration_ms)
    times = {first.found_by: first.iteration_ms}
    plans = {first.found_by: first.plan}
    result = Result((first,), 0.0, stop.reason, times, plans, stop.elapsed_s, 0, seed)
    answer = Answer(setting, result, (prediction,), inputs.head)
    return with_advice(answer, stop, effort=0.0)


def with_constraint_costs(answer: Answer, stop: Stop) -> Answer:
    """Add the cost of the model's constraints to an answer, if there is time left."""
    if stop.is_interrupted or answer.result.in_use is not None:
        return answer
    problem, best, left_s = answer.setting.problem(), answer.result.best, stop.left_s
    # what every search of a large problem does takes about this part of one
    large = len(best.plan.tables) * best.plan.world_size > SearchParams.large
    if left_s <= (FREE_EFFORT * answer.result.search_seconds if large else 0.0):
        return answer
    limit_s = None if stop.time_limit_s is None else left_s
    budget = Stop(stop.effort * FREE_EFFORT, limit_s, reserve=FREE_RESERVE)
    costs = price_constraints(problem, best.plan, best.iteration_ms, budget, answer.result.seed)
    return replace(answer, constraint_costs=costs)


def followed_up(answer: Answer, stop: Stop) -> Answer:
    """Add the cost of constraints, and advice on changes besides the plan, as far as there is
    time."""
    return with_advice(with_constraint_costs(answer, stop), stop)


def with_advice(answer: Answer, stop: Stop, effort: float | None = None) -> Answer:
    """Add advice on changes besides the plan to an answer, if there is time left.

    Args:
        effort: effort of planning again for the best changes; None for that of the search.
    """
    if stop.is_interrupted:
        return answer
    advisor = Advisor(
        answer.setting.case(),
        answer.result.best.plan,
        answer.best.iteration_ms,
        effort=stop.effort if effort is None else effort,
        left_s=lambda: stop.left_s,
    )
    return replace(answer, advised=advisor.advise())


def apply_advice(answer: Answer, request: PlanRequest, numbers: Sequence[int], path: Path) -> str:
    """Write a copy of the model file that follows some of the advice, by number from 1.

    Returns:
        The text of the plan file for that copy.

    Raises:
        InputError: no advice has such a number, or the file cannot be written.
    """
    assert request.model is not None
    best = answer.result.best.plan
    advisor = Advisor(answer.setting.case(), best, answer.best.iteration_ms)
    chosen = advisor.choose(answer.advised or Advised(), numbers)
    apply_changes(request.model, load_model(request.model), chosen.case.workload, path)
    setting = resolve(
        path, replace(request, batch_size=None), None if request.gpus or request.cluster else best
    )
    head = {**setting.head(request.seed), "iteration_ms": chosen.iteration_ms}
    return _plan_file(chosen.plan, head)


def _plan_file(plan: ShardingPlan, head: Mapping[str, Any]) -> str:
    """Return the text of a plan file, with the plan's own ranks."""
    ranks = ("world_size", "local_world_size")
    meta = {key: value for key, value in head.items() if key not in ranks}
    return plan_text(plan_to_dict(replace(plan, meta=meta)))
