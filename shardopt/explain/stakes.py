"""Where sharding does not matter: what would."""

from __future__ import annotations

from dataclasses import dataclass

from predictor.predict import Prediction
from search.expected_gain import Stakes, stakes
from search.problem import Problem, Result
from shardopt.explain.whatif import WhatIf, sensitivity
from shardopt.formatting import ms, percent, phase_words

SPARSE = (
    "input_dist",
    "prefetch",
    "embedding_forward",
    "output_dist_forward",
    "output_dist_backward",
    "embedding_backward",
)
"""Phases that a sharding plan decides on."""
SHOWN = 3


@dataclass(frozen=True)
class Alternatives:
    """What to look at instead of the sharding plan.

    Args:
        stakes: how little plans differ.
        sparse_share: of the iteration, that lookups and their exchanges take.
        largest: the largest phases of the critical path with their shares.
        changes: of machine, batch and settings that save most time.
    """

    stakes: Stakes
    sparse_share: float
    largest: tuple[tuple[str, float], ...]
    changes: tuple[WhatIf, ...]


def alternatives(problem: Problem, result: Result, best: Prediction) -> Alternatives | None:
    """What would matter instead; None where sharding matters, or little was compared."""
    if result.stopped_by in ("time", "interrupted"):
        return None
    found = stakes(problem, result)
    if found is None or found.matters:
        return None
    total = best.iteration_ms
    parts = sorted(best.breakdown.items(), key=lambda item: -item[1])
    changes = [w for w in sensitivity(problem, result.best.plan, best) if w.kind != "batch"]
    changes.sort(key=lambda w: w.change_ms)
    return Alternatives(
        found,
        sum(best.breakdown.get(phase, 0.0) for phase in SPARSE) / total,
        tuple((phase, ms / total) for phase, ms in parts[:SHOWN]),
        tuple(w for w in changes[:SHOWN] if w.change_ms < 0),
    )


def instead_text(instead: Alternatives) -> str:
    """That sharding hardly matters, and what would."""
    stakes = instead.stakes
    parts = ", ".join(f"{phase_words(phase)} {percent(share)}" for phase, share in instead.largest)
    text = (
        f"Sharding hardly matters here: {stakes.plans} sane plans are within "
        f"{percent(stakes.spread)} of each other, no more than the known errors of the costs could "
        f"hide; lookups and exchanges take {percent(instead.sparse_share)} of the iteration. "
        f"The largest parts are {parts}."
    )
    if instead.changes:
        saved = "; ".join(f"{w.change}: {ms(-w.change_ms)} less" for w in instead.changes)
        text += f" What would help more: {saved}."
    return text
