"""Time of a pipeline of stages under the one-forward-one-backward schedule.

Stage ``s`` of ``p`` starts with ``min(p - 1 - s, m)`` forward passes, then alternates forward and
backward, then finishes the backward passes (Narayanan et al. 2019 and 2021, arXiv 2104.04473,
section 2.2; Megatron's forward_backward_pipelining_without_interleaving). A stage sends its result
to the next one and is busy until it has arrived. Costs are the same for all micro-batches.

The recurrence is what `predictor.iteration.timeline` does with one rank a stage (a test holds them
equal), for many configurations at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Pass = tuple[int, bool, int]
"""Stage, whether it is a backward pass, micro-batch."""


def schedule(stages: int, micro_batches: int) -> list[Pass]:
    """All passes, each after those it waits for."""
    orders = [list(_stage_order(s, stages, micro_batches)) for s in range(stages)]
    done = np.zeros((stages, 2), dtype=np.int64)
    position = [0] * stages
    found: list[Pass] = []
    while len(found) < 2 * stages * micro_batches:
        for stage, order in enumerate(orders):
            while position[stage] < len(order):
                backward, index = order[position[stage]]
                source = stage + 1 if backward else stage - 1
                if 0 <= source < stages and done[source, int(backward)] <= index:
                    break
                found.append((stage, backward, index))
                done[stage, int(backward)] += 1
                position[stage] += 1
    return found


def _stage_order(stage: int, stages: int, micro_batches: int) -> Iterator[tuple[bool, int]]:
    warm_up = min(stages - 1 - stage, micro_batches)
    for index in range(warm_up):
        yield False, index
    for index in range(warm_up, micro_batches):
        yield False, index
        yield True, index - warm_up
    for index in range(micro_batches - warm_up, micro_batches):
        yield True, index


def pipeline_ms(
    forward_ms: ArrayLike, backward_ms: ArrayLike, send_ms: ArrayLike, micro_batches: int
) -> Array:
    """Time until the last stage is done.

    Args:
        forward_ms, backward_ms: of one micro-batch, ``[..., stages]``.
        send_ms: from one stage to the next, either way, ``[...]``.
    """
    forward, backward = np.asarray(forward_ms, float), np.asarray(backward_ms, float)
    stages = forward.shape[-1]
    if stages == 1:
        return np.asarray(micro_batches * (forward + backward)[..., 0])
    send = np.asarray(send_ms, dtype=np.float64)
    free = [np.zeros(forward.shape[:-1]) for _ in range(stages)]
    arrived: dict[Pass, Array] = {}
    for stage, is_backward, index in schedule(stages, micro_batches):
        step = -1 if is_backward else 1
        start = free[stage]
        source = (stage - step, is_backward, index)
        if source in arrived:
            start = np.maximum(start, arrived.pop(source))
        end = start + (backward if is_backward else forward)[..., stage]
        if 0 <= stage + step < stages:
            end = end + send
            arrived[stage, is_backward, index] = end
        free[stage] = end
    return np.asarray(np.max(free, axis=0))
