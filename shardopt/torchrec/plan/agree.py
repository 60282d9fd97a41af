"""What all ranks must agree on before a running job is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from predictor.errors import PlanError
from shardopt.extras import needs_torchrec

with needs_torchrec():
    import torch.distributed as dist


def agree(mine: str, problems: Sequence[str], what: str, remedy: str) -> None:
    """All ranks mean the same, and none has a problem with it; to be called on all at once.

    Args:
        mine: digest of what this rank means.
        problems: why it cannot be done here, a phrase each.
        what: cannot be done, and remedy: what to do instead, for the message.

    Raises:
        PlanError: on every rank, with the problems of all.
    """
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (mine, list(problems)))
    digests = [of for of, _ in found]
    told = list(dict.fromkeys(problem for _, of in found for problem in of))
    if len(set(digests)) > 1:
        others = [rank for rank, of in enumerate(digests) if of != digests[0]]
        told.insert(0, f"ranks {others} have another proposal than rank 0")
    if told:
        raise PlanError(f"{what}: {'; '.join(told)}. {remedy}")
