"""What summing gradients takes in steps of CPU ranks, and errors of kernel models by kind of op."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from lab.replay.op_fit import CapturedStep
from lab.transformers.files import GradientSync
from predictor.cost.ops.cpu_ops import VIEW, OpModels, group_of
from predictor.iteration.op_graph import CollectiveStart

LEAST_SHARE = 1e-3


def fit_sync(
    buckets: Sequence[Sequence[CollectiveStart]], extra_ms: Sequence[float]
) -> GradientSync:
    """What summing gradients takes, from steps with and without.

    Args:
        buckets: the all-reduces of each step.
        extra_ms: of each step, what it takes longer with it.
    """
    from scipy.optimize import nnls

    sizes = [(len(of), sum(b.gradients for b in of), sum(b.bytes for b in of)) for of in buckets]
    rows, extra = np.array(sizes, dtype=np.float64), np.array(extra_ms)
    scale = rows.max(axis=0)
    # large steps have large noise: in between relative and absolute errors
    weights = 1 / np.sqrt(np.maximum(extra, extra.max() * LEAST_SHARE))
    found, _ = nnls(rows / scale * weights[:, None], extra * weights)
    return GradientSync(*(found / scale))


def errors_by_group(
    steps: Sequence[CapturedStep], models: OpModels
) -> Mapping[str, tuple[float, float]]:
    """Group -> share of the steps that its ops take, and its error as a share of its time."""
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for step in steps:
        for row, ms in zip(step.rows, step.ms, strict=True):
            if row.kind != VIEW:
                both = spent[group_of(row.kind)]
                both[0] += ms
                both[1] += models.row_ms(row)
    whole = sum(step.step_ms for step in steps)
    return {group: (ms / whole, model / ms - 1) for group, (ms, model) in spent.items()}
