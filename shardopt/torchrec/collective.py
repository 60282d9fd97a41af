"""One rank plans and all get its plan, or its error."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from predictor.errors import InputError
from shardopt.extras import needs_torchrec
from shardopt.logs import logger
from shardopt.torchrec.private import shortest_timeout_s, timeout_of_cpus

with needs_torchrec():
    import torch.distributed as dist
    from torchrec.distributed.planner.types import PlannerError, PlannerErrorType

ADVICE_ON_WAITING = (
    "call collective_plan on every rank of the group, and give init_process_group a longer timeout "
    "than the search needs (timeout_seconds limits the search)"
)
SHARE = 0.25
"""Share of a group's timeout that the first rank may search: the others wait in a broadcast, and
the group would give them up. 150 s of NCCL's 10 minutes, 450 s of gloo's 30."""
SHORTEST_S = 600.0
"""Timeout of a group that does not tell its own: the shortest default, NCCL's."""


def joined() -> bool:
    """Tell if there is a process group."""
    return dist.is_available() and dist.is_initialized()


def search_seconds(limit_s: float | None, group: Any = None) -> float | None:
    """Ceiling in s on a search that other ranks wait for; None where nobody waits.

    Args:
        limit_s: the user's own ceiling.
        group: a process group; the default one if None.
    """
    if not joined() or dist.get_world_size(group) == 1:
        return limit_s
    limit = SHARE * (shortest_timeout_s(group or dist.group.WORLD) or SHORTEST_S)
    if limit_s is not None and limit_s > limit:
        logger.warning(
            "timeout_seconds is %g, but the other ranks wait in a group that gives up after %g s: "
            "the search is limited to %g s; a longer timeout of init_process_group allows more",
            limit_s,
            limit / SHARE,
            limit,
        )
    return limit if limit_s is None else min(limit_s, limit)


def check_ranks(planned: int, group: Any = None) -> None:
    """Warn of a topology of other ranks than a group has: as TorchRec's, the plan is for those of
    the topology.

    A topology of fewer ranks, which divide those of the group, is that of a sharding group of 2D
    parallelism, as TorchRec's `DMPCollection` takes it.

    Args:
        planned: ranks of the topology.
        group: a process group; the default one if None.
    """
    ranks = dist.get_world_size(group) if joined() else planned
    if ranks % planned:
        logger.warning(
            "the topology has %d ranks, but the process group has %d: the plan is for %d ranks and "
            "does not run on this group; give Topology(world_size=%d, ...), or leave topology out",
            planned,
            ranks,
            planned,
            ranks,
        )


T = TypeVar("T")


def on_first_rank(plan: Callable[[], T], group: Any = None) -> T:
    """Return, or raise, on every rank what ``plan`` does on the group's first rank.

    TorchRec's `invoke_on_rank_and_broadcast_result` leaves the other ranks waiting when the first
    fails. A rank that never arrives is waited for until the group's own timeout: gloo then says
    which ranks are missing; NCCL's watchdog ends the process with its own message.

    Args:
        group: a process group; the default one if None.

    Raises:
        InputError: there is no process group.
        PlannerError: a rank did not arrive or was lost; or what ``plan`` raised.
    """
    if not joined():
        raise InputError(
            "collective_plan needs a process group: call torch.distributed.init_process_group() "
            "first, or use plan() in a single process"
        )
    group = group or dist.group.WORLD
    if dist.get_world_size(group) == 1:
        return plan()
    if dist.get_backend(group) == "gloo":  # the only backend that tells who is missing
        # before the search, and not after it; left out, the timeout would be torch's default of 30
        # minutes, whatever the group's own is
        try:
            dist.monitored_barrier(group, timeout_of_cpus(group), wait_all_ranks=True)
        except RuntimeError as error:
            raise _lost_rank_error("some ranks did not call collective_plan", error) from error
    answer = _plan_or_error(plan) if dist.get_rank(group) == 0 else None
    result: Any = _broadcast(answer, group)
    if isinstance(result, Exception):
        raise result
    whole: T = result
    return whole


def _plan_or_error(plan: Callable[[], Any]) -> Any:
    """Return the plan or the error that ``plan`` raised, in words where it cannot be pickled."""
    try:
        answer = plan()
        pickle.dumps(answer)  # an answer that cannot be sent would leave the others waiting
        return answer
    except Exception as error:
        logger.exception("planning failed; all ranks get this error")
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            message = f"{type(error).__name__}: {error}"
            return PlannerError(error_type=PlannerErrorType.OTHER, message=message)
        return error


def _broadcast(answer: Any, group: Any) -> Any:
    box = [answer]
    try:
        dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    except RuntimeError as error:
        if isinstance(answer, Exception):
            raise answer from error
        raise _lost_rank_error("the plan did not get from rank 0 to all", error) from error
    return box[0]


def on_all_ranks(yes: bool, group: Any = None) -> bool:
    """Tell if all ranks of a group say yes; a rank that does not answer says no."""
    answers: list[Any] = [None] * dist.get_world_size(group)
    try:
        dist.all_gather_object(answers, yes, group=group)
    except RuntimeError:
        return False
    return all(answers)


def _lost_rank_error(problem: str, error: Exception) -> PlannerError:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    message = f"{problem} ({first}); {ADVICE_ON_WAITING}"
    return PlannerError(error_type=PlannerErrorType.OTHER, message=message)
