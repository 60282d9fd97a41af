"""What runs on a CPU in place of ops of GPUs that do the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _batch_norm_backward(
    x: Any,
    gradient: Any,
    weight: Any,
    mean: Any,
    var: Any,
    saved_mean: Any,
    saved_scale: Any,
    epsilon: float,
    *_: Any,
) -> Any:
    kept = [True, weight is not None, weight is not None]
    return torch.ops.aten.native_batch_norm_backward(
        gradient, x, weight, mean, var, saved_mean, saved_scale, True, epsilon, kept
    )  # fmt: skip


def _pin(x: Any, *_: Any) -> Any:
    return x.clone()


ON_CPU: dict[str, tuple[str, Callable[..., Any]]] = {
    "aten::cudnn_batch_norm_backward": (
        "aten::native_batch_norm_backward",
        _batch_norm_backward,
    ),
    "aten::pin_memory": ("aten::clone", _pin),
}
"""Op -> what it runs as, and the call; both give the same shapes."""
