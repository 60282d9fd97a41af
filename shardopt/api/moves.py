"""A move from the plan in use, as JSON holds it: of ``plan --from`` and of a running job."""

from __future__ import annotations

from typing import Any

from search.in_use.price import Move
from search.problem import Result


def from_object(result: Result, move: Move | None, path: object) -> dict[str, Any]:
    """``from`` and ``move`` of ``shardopt plan --json``; nothing without ``--from``.

    Keys of ``from``:
        plan: the path as given.
        iteration_ms: predicted time of the plan in use.
        misfits: why it cannot stay as it is; empty if it can.
        max_moves: tables that could move, null for all.
        moved: keys of the tables that differ in the best plan.
        moved_bytes: weights and optimizer state that reach a rank which did not hold them.
        max_bytes: that could move, null for any number.
        horizon: steps over which a move had to pay for itself.

    Keys of ``move``:
        bytes, link_bytes: as ``moved_bytes``, in all and by link.
        seconds: that the job stands still.
        pays_back_after_steps: null where the plan in use is as fast.
        both_copies_bytes: of the rank that has most to hold meanwhile.
        in_place: TorchRec can make this move while the job runs.
        recommended: there is a move, and it pays for itself or the plan in use cannot stay.
        lower_bound_gain: no plan within the limits gains more, a share of the time in use.
    """
    given = result.in_use
    if given is None or move is None:
        return {}
    return {
        "from": {
            "plan": str(path),
            "iteration_ms": given.iteration_ms,
            "misfits": list(given.misfits),
            "max_moves": given.max_moves,
            "moved": list(move.tables),
            "moved_bytes": move.bytes,
            "max_bytes": given.max_bytes,
            "horizon": given.horizon,
        },
        "move": {
            "bytes": move.bytes,
            "link_bytes": dict(move.link_bytes),
            "seconds": move.seconds,
            "pays_back_after_steps": move.pays_back_after(
                given.iteration_ms, result.best.iteration_ms
            ),
            "both_copies_bytes": move.both_copies_bytes,
            "in_place": move.in_place,
            "recommended": bool(move.tables),
            "lower_bound_gain": max(0.0, 1 - result.lower_bound_ms / given.iteration_ms),
        },
    }
