"""What follows the embedding modules of a model: from their outputs to the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lab.rankers.architecture import Architecture
from shardopt.extras import needs_torchrec

with needs_torchrec():
    import torch
    from torch import nn

Found = Mapping[str, Any]
"""Module -> its outputs: a KeyedTensor, or a JaggedTensor by key."""
Keys = Mapping[str, Sequence[tuple[str, int]]]
"""Module -> key and width of each of its outputs, in the workload's order."""


class Body(nn.Module):
    """A dense part: (dense features, labels, `Found`) -> (loss, logits).

    Args:
        architecture: kind and sizes.
        keys: of the embedding modules' outputs.
    """

    def __init__(self, architecture: Architecture, keys: Keys) -> None:
        super().__init__()
        self.architecture, self.keys = architecture, keys

    def pooled(self, found: Found, module: str) -> list[torch.Tensor]:
        """``[batch, width]`` of every output of a module of bags.

        Taken by key: the order inside a KeyedTensor depends on the sharding plan.
        """
        by_key = found[module].to_dict()
        return [by_key[key] for key, _ in self.keys[module]]

    def width(self, module: str) -> int:
        """Of all outputs of a module side by side."""
        return sum(width for _, width in self.keys[module])


def binary_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean binary cross-entropy of ``[batch, tasks]``, each task with the same labels."""
    targets = labels.unsqueeze(-1).expand_as(logits)
    return nn.functional.binary_cross_entropy_with_logits(logits, targets)
