"""The answer to a request that also tunes settings."""

from __future__ import annotations

from collections.abc import Sequence

from search.tune.goals import Values
from search.tune.knobs import change_lines, changes
from search.tune.tune import Member, TuneResult, Tuning
from shardopt.api.answer import Answer
from shardopt.api.document import TuneAnswer, TuneKeys


def tune_answer(
    answer: Answer,
    tuning: Tuning,
    tuned: TuneResult,
    members: Sequence[Member],
    study: str | None,
) -> TuneAnswer:
    """The plans of the best setting, and how that was found.

    Args:
        members: settings that no other beats, best by the first goal first.
        study: its name in the storage; None without one.
    """

    def named(values: Values | None) -> dict[str, float] | None:
        if values is None:
            return None
        return {goal.name: value for goal, value in zip(tuning.goals, values, strict=True)}

    front = [
        {
            **vars(member.trial),
            "changes": change_lines(tuning.case, member.trial.setting),
            "objectives": named(member.values),
            "iteration_ms": member.result.best.iteration_ms,
            "lower_bound_ms": member.result.lower_bound_ms,
            "undone": tuning.undone(member),
            "tables": member.result.best.plan,
        }
        for member in members
    ]
    trials = [
        {
            **vars(trial),
            "objectives": named(trial.values),
            "bound": named(trial.bound),
            "as_given": not changes(tuning.case, trial.setting),
        }
        for trial in tuned.trials
    ]
    tune = {
        "objectives": {goal.name: goal.unit for goal in tuning.goals},
        "values": tuning.grid.values,
        "settings": tuning.grid.size,
        "trials": trials,
        "best": front[0],
        "front": front,
        "stopped_by": tuned.stopped_by,
        "study": study,
    }
    plan = answer.document()
    keys = {name: getattr(plan, name) for name in plan.model_fields_set}
    return TuneAnswer(**keys, tune=TuneKeys.model_validate(tune))
