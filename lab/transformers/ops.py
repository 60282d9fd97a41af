"""The ops of a training step as calls of a rank, without running the step.

Forward, backward and optimizer go through PyTorch's dispatcher with fake tensors, so the list is
that of a real step, op by op (`shardopt.torchrec.capture.recorder`).

Why: docs/decisions/0019.
"""

from __future__ import annotations

import bisect
from contextlib import nullcontext
from typing import Any

from lab.replay.transformers import Training
from lab.transformer import TransformerShape
from lab.transformers.steps import BACKWARD, FORWARD, OPTIMIZER, gradient_sum, training_step
from predictor.cost.ops.cpu_ops import OpRow, kind_and_sizes, reuse_bytes
from predictor.iteration.op_graph import CollectiveStart, RankCalls
from shardopt.torchrec.capture.recorder import Recorder, Recording

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1024 * 1024, 25 * 1024 * 1024
"""DDP's defaults, where ``bucket_cap_mb`` is not given (torch/nn/parallel/distributed.py)."""


def record_step(shape: TransformerShape, *, real: bool = False) -> Recording:
    """The second step of a training, when the optimizer has its states.

    Args:
        real: run it, instead of passing fake tensors through it.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with nullcontext() if real else FakeTensorMode():
        training = Training(shape)
        recorder = Recorder()
        for parameter in training.model.parameters():
            parameter.register_post_accumulate_grad_hook(recorder.gradient)
        with recorder:
            training.step(recorder.mark)
    return recorder.recording


def step_calls(recording: Recording) -> RankCalls:
    """The calls of a step, as a rank runs them that sums its gradients with others.

    Calls of one part, kind and size become one row. A part of the backward ends where a bucket of
    gradients is complete.
    """
    calls = [recorded.call for recorded in recording.calls]
    ends, buckets = _buckets(recording)
    found: dict[str, dict[tuple[str, tuple[int, ...]], list[Any]]] = {}
    for at, (call, reuse) in enumerate(zip(calls, reuse_bytes(calls), strict=True)):
        rows = found.setdefault(_part(at, recording.marks, ends), {})
        rows.setdefault(kind_and_sizes(call), []).append(reuse)
    parts = {
        part: tuple(
            OpRow(kind, sizes, tuple(map(float, sum(reuses))), len(reuses))
            for (kind, sizes), reuses in rows.items()
        )
        for part, rows in found.items()
    }
    return training_step(parts, buckets)


def row_index(recording: Recording) -> list[int]:
    """The row of every call, counted through all parts of `step_calls`."""
    ends, _ = _buckets(recording)
    rows: dict[tuple[str, str, tuple[int, ...]], int] = {}
    keys = []
    for at, recorded in enumerate(recording.calls):
        part = _part(at, recording.marks, ends)
        keys.append((part, *kind_and_sizes(recorded.call)))
        rows.setdefault(keys[-1], len(rows))
    # parts follow each other, so rows are numbered part by part as they first appear
    return [rows[key] for key in keys]


def _buckets(recording: Recording) -> tuple[list[int], tuple[CollectiveStart, ...]]:
    """Number of the call that completes each bucket, and its sum.

    As DistributedDataParallel rebuilds its buckets after the first step: gradients in the order in
    which they arrive, the first bucket of 1 MiB, the others of 25 MiB, none split.
    """
    ends: list[int] = []
    buckets: list[CollectiveStart] = []
    count, size, cap = 0, 0, FIRST_BUCKET_BYTES
    for at, more in recording.gradients:
        count, size = count + 1, size + more
        if size >= cap:
            ends.append(at)
            buckets.append(gradient_sum(count, size))
            count, size, cap = 0, 0, BUCKET_BYTES
    if count:
        ends.append(recording.marks[OPTIMIZER])
        buckets.append(gradient_sum(count, size))
    return ends, tuple(buckets)


def _part(at: int, marks: dict[str, int], ends: list[int]) -> str:
    if at < marks[BACKWARD]:
        return FORWARD
    if at >= marks[OPTIMIZER]:
        return OPTIMIZER
    return f"{BACKWARD}.{min(bisect.bisect_right(ends, at), len(ends) - 1)}"
