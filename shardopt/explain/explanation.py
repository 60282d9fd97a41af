"""What ``shardopt explain`` finds out about a plan, for the console, ``--json`` and ``--html``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from search.problem import Problem
from shardopt.explain.changes import Changes, best_changes
from shardopt.explain.waits import Wait, waits
from shardopt.explain.whatif import WhatIf, sensitivity
from shardopt.report.plan.predict_view import Predicted


@dataclass(frozen=True)
class Explanation:
    """One plan explained, beside others.

    Args:
        waits: on the critical path, the longest first.
        what_if: the same plan with something else than the plan changed.
        others: further plans to compare with, in the order given.
    """

    given: Predicted
    waits: Sequence[Wait]
    changes: Changes
    what_if: Sequence[WhatIf]
    others: Sequence[Predicted] = ()

    @property
    def plans(self) -> list[Predicted]:
        """The plan, then the others."""
        return [self.given, *self.others]


def explained(problem: Problem, plans: Sequence[Predicted]) -> Explanation:
    """The first of the plans explained; deterministic, a few seconds at most."""
    given, *others = plans
    plan, prediction = given.plan, given.prediction
    return Explanation(
        given,
        waits(problem, plan, prediction),
        best_changes(problem, plan, prediction),
        sensitivity(problem, plan, prediction),
        others,
    )
