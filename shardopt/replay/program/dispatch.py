"""What PyTorch's dispatcher knows of an op."""

from __future__ import annotations


def has_kernel(op: str, key: str) -> bool:
    """Whether an op (with its overload, if it has one) is registered under a dispatch key."""
    import torch

    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op, key))
    except RuntimeError:
        return False
