"""Rankers of published steps, as `to_yaml` captures them: under autocast, then compiled."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from predictor.model.captured import CapturedDense
from predictor.model.workload import Table, Workload
from shardopt.extras import needs_torchrec

with needs_torchrec():
    import torch
    from torch import nn
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from shardopt.torchrec import to_yaml

SAMPLES = 2
"""Samples of the example that is captured; axes as long grow with the batch."""


def compiled_ranker(
    module: nn.Module,
    lengths: Mapping[str, int],
    in_features: int,
    with_data: Callable[[Table], Table],
    **more: Any,
) -> Workload:
    """Return a module's workload in bf16 by autocast, compiled, with Adam for the dense part.

    Args:
        lengths: ids of a sample, by feature.
        in_features: dense inputs of a sample.
        with_data: adds to a table what a module does not know, such as its index distributions.
        more: arguments of `to_yaml`.
    """
    per_sample = [length for length in lengths.values() for _ in range(SAMPLES)]
    values = torch.zeros(sum(per_sample), dtype=torch.int64)
    example = (
        torch.zeros(SAMPLES, in_features),
        KeyedJaggedTensor([*lengths], values, lengths=torch.tensor(per_sample)),
        torch.zeros(SAMPLES),
    )
    with tempfile.TemporaryDirectory() as folder:
        workload = to_yaml(
            module,
            Path(folder) / "model.yaml",
            dense_data_type="bf16",
            dense_optimizer="adam",
            example_inputs=example,
            **more,
        )
    assert isinstance(workload.dense, CapturedDense)
    dense = replace(workload.dense, compiled=True)
    return replace(workload, tables=tuple(map(with_data, workload.tables)), dense=dense)
