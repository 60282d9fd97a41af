"""Ranks that wait for the one with the longest batch: when that is the first thing to say."""

from __future__ import annotations

from predictor.predict import WAITING, Prediction
from shardopt.formatting import ms, percent

DECIDES = 0.03
"""Share of an iteration that ranks wait from which on it is said."""


def waiting_words(prediction: Prediction) -> str | None:
    """Say how long ranks wait; None where that is hardly at all."""
    waiting = prediction.breakdown.get(WAITING, 0.0)
    share = waiting / prediction.iteration_ms
    if share < DECIDES:
        return None
    return (
        f"Ranks wait {ms(waiting)}, {percent(share)} of the iteration, for the one with the "
        "longest batch"
    )


def uneven_words(prediction: Prediction, gap: float | None) -> str | None:
    """Say in one line that uneven batches decide; None where ranks hardly wait, or another plan
    may gain more.

    Args:
        gap: how far the plan may be from optimal; None if no bound is known.
    """
    words = waiting_words(prediction)
    most = 1.0 if gap is None else gap / (1.0 + gap)
    if words is None or prediction.breakdown[WAITING] < most * prediction.iteration_ms:
        return None
    return (
        f"{words}; another plan can gain {percent(most)} at most. Batches that are balanced by the "
        "lengths of their samples end the wait."
    )
