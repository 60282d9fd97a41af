"""Small models of many kinds, to capture."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class Mlp(nn.Module):
    """Linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 1))

    def forward(self, x: Tensor) -> Tensor:
        """``[B, 24]`` to a loss."""
        return self.layers(x).square().mean()


class Encoder(nn.Module):
    """Two transformer layers over a history."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True) for _ in range(2)
        )
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        """``[B, 10, 32]`` to a loss."""
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x.sum()


class Convolutions(nn.Module):
    """Convolutions in one and two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Conv2d(3, 8, 3, padding=1)
        self.narrow = nn.Conv2d(8, 8, 3, stride=2)
        self.line = nn.Conv1d(8, 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, 3, 16, 16]`` to a loss."""
        x = self.narrow(functional.relu(self.wide(x)))
        return self.line(x.flatten(2)).square().sum()


class Attention(nn.Module):
    """Fused attention, with a mask and without."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, 12, 32]`` to a loss."""
        query, key, value = (
            part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.project(x).chunk(3, dim=-1)
        )
        plain = functional.scaled_dot_product_attention(query, key, value)
        causal = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return (plain * causal).sum()


class Einsum(nn.Module):
    """Products written as einsum, and one weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16, 8))

    def forward(self, x: Tensor) -> Tensor:
        """``[B, 6, 16]`` to a loss."""
        y = torch.einsum("bnd,hde->bhne", x, self.weight)
        scores = torch.einsum("bhne,bhme->bhnm", y, y)
        return torch.einsum("bhnm,bmd,hde->be", scores, x, self.weight).sum()


class Autocast(nn.Module):
    """Layers under autocast, as a model for GPUs writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, 16]`` to a loss."""
        with torch.autocast("cuda", torch.bfloat16):
            x = self.second(functional.gelu(self.first(x)))
        return x.float().mean()
