"""All that there is to say of a search: what its cache keeps, and what `shardopt plan` shows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from predictor.cost.loads import ShardLoads
from predictor.predict import Prediction
from search.expected_gain import ExpectedGain, gain_over_baseline
from search.in_use.price import Move
from search.problem import Result
from search.stop import Stop
from shardopt.api.setting import Setting
from shardopt.explain.deciding import DecidingConstant, deciding_constants, known_plans
from shardopt.explain.differences import find_move
from shardopt.explain.stakes import Alternatives, alternatives


@dataclass(frozen=True)
class Findings:
    """A search and what follows from it, as a cache keeps it.

    Args:
        move: from the plan in use to the best plan, where there is one.
        gain: of the best plan over TorchRec's, where that has one.
        instead: what matters more, where sharding does not.
        deciding: constants whose stated errors could make another plan the faster one.
    """

    result: Result
    move: Move | None
    gain: ExpectedGain | None
    instead: Alternatives | None
    deciding: tuple[DecidingConstant, ...] = ()


@dataclass(frozen=True)
class SearchOutcome(Findings):
    """What `shardopt plan` shows.

    Args:
        predictions: of ``result.plans``, in their order.
    """

    predictions: tuple[Prediction, ...] = ()


def find_outcome(setting: Setting, result: Result, stop: Stop) -> SearchOutcome:
    """What follows from a search in its setting; of the best plan, and of those of the others for
    whose prediction there is time. What else there is no time for is left out."""
    problem = setting.problem()
    shards = ShardLoads(problem.workload, problem.topology, problem.hardware)
    problem = replace(problem, loads=shards)  # that all of the below share
    predictions = _predict(setting, result, stop)
    result = replace(result, plans=result.plans[: len(predictions)])
    move = find_move(problem, result)
    if stop.time_limit_s is not None and stop.elapsed_s > stop.time_limit_s:
        return SearchOutcome(result, move, None, None, predictions=tuple(predictions))
    return SearchOutcome(
        result,
        move,
        gain_over_baseline(problem, result),
        alternatives(problem, result, predictions[0]),
        tuple(deciding_constants(problem, result.best.plan, known_plans(result))),
        tuple(predictions),
    )


def _predict(setting: Setting, result: Result, stop: Stop) -> list[Prediction]:
    found: list[Prediction] = []
    took = 0.0
    for ranked in result.plans:
        before = stop.elapsed_s
        if found and stop.time_limit_s is not None and before + took > stop.time_limit_s:
            break
        found.append(setting.predict(ranked.plan))
        took = stop.elapsed_s - before
    return found
