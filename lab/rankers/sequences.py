"""Models of histories: an EmbeddingCollection's rows, padded, through attention.

The features of the collection are histories, but for the last, which is the one candidate; those of
bags, where there are some, describe the user. ``length``: items that a history is padded or cut to;
``blocks`` of ``heads`` heads, as wide as the collection; ``top``: widths of the MLP over history,
candidate and the rest, whose output follows.
"""

from __future__ import annotations

from typing import Any

from lab.rankers.architecture import Architecture
from lab.rankers.body import Body, Found, Keys, binary_loss
from shardopt.extras import needs_torchrec

with needs_torchrec():
    import torch
    from torch import nn
    from torchrec.modules.mlp import MLP

COLLECTION = "ec"
"""The module of the sequences."""


class HistoryBody(Body):
    """Histories, summed over features and encoded, beside the candidate, bags and dense features.

    Args:
        block: class of the encoder's blocks, made with (width, heads, length).
    """

    def __init__(self, architecture: Architecture, keys: Keys, block: type[nn.Module]) -> None:
        super().__init__(architecture, keys)
        self.length = architecture.number("length")
        self.bags = [module for module in keys if module != COLLECTION]
        *self.histories, self.candidate = (key for key, _ in keys[COLLECTION])
        dim = keys[COLLECTION][0][1]
        heads = architecture.number("heads")
        self.positions = nn.Parameter(0.01 * torch.randn(self.length, dim))
        self.blocks = nn.Sequential(
            *(block(dim, heads, self.length) for _ in range(architecture.number("blocks")))
        )
        width = architecture.in_features + 2 * dim + sum(self.width(m) for m in self.bags)
        self.top = MLP(width, [*architecture.widths("top"), 1], activation_on_last=False)

    def forward(
        self, dense: torch.Tensor, labels: torch.Tensor, found: Found
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean loss over the batch, and the logits."""
        rows = found[COLLECTION]
        x = self.positions + sum(self._padded(rows[key], self.length) for key in self.histories)
        encoded = self.blocks(x)
        candidate = self._padded(rows[self.candidate], 1).squeeze(1)
        pooled = [output for module in self.bags for output in self.pooled(found, module)]
        features = torch.cat([dense, encoded[:, -1], candidate, *pooled], dim=1)
        logits = self.top(features)
        return binary_loss(logits, labels), logits

    def _padded(self, sequences: Any, length: int) -> torch.Tensor:
        """``[batch, length, dim]``; zeros behind the items of a short history."""
        padded: torch.Tensor = torch.ops.fbgemm.jagged_to_padded_dense(
            sequences.values(), [sequences.offsets()], [length], 0.0
        )
        return padded


class TransformerBlock(nn.Module):
    """Causal self-attention and a point-wise network, each normed before and added after.

    SASRec (Kang and McAuley 2018), with GELU between the two layers.
    """

    def __init__(self, dim: int, heads: int, length: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.wide, self.narrow = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        future = nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("future", future, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, length, dim]`` to the same."""
        normed = self.norms[0](x)
        seen, _ = self.attention(normed, normed, normed, attn_mask=self.future, need_weights=False)
        x = x + seen
        return x + self.narrow(nn.functional.gelu(self.wide(self.norms[1](x))))


class GatedBlock(nn.Module):
    """HSTU's layer (Zhai et al. 2024, eq. 1-3): attention by SiLU in place of softmax, and gates.

    Without the relative bias of positions and times.
    """

    def __init__(self, dim: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads, self.length = heads, length
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.project, self.out = nn.Linear(dim, 4 * dim), nn.Linear(dim, dim)
        self.register_buffer("past", torch.ones(length, length).tril(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, length, dim]`` to the same."""
        projected = nn.functional.silu(self.project(self.norms[0](x)))
        gate, value, query, key = projected.chunk(4, dim=-1)
        query, key, value = (self._by_head(part) for part in (query, key, value))
        scores = nn.functional.silu(query @ key.transpose(-1, -2)) * (self.past / self.length)
        seen = (scores @ value).transpose(1, 2).reshape(x.shape)
        return x + self.out(self.norms[1](seen) * gate)

    def _by_head(self, part: torch.Tensor) -> torch.Tensor:
        """``[batch, heads, length, dim / heads]``."""
        return part.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class TransformerBody(HistoryBody):
    """SASRec-like: a causal transformer over the history."""

    def __init__(self, architecture: Architecture, keys: Keys) -> None:
        super().__init__(architecture, keys, TransformerBlock)


class GatedBody(HistoryBody):
    """HSTU-like: gated attention over the history."""

    def __init__(self, architecture: Architecture, keys: Keys) -> None:
        super().__init__(architecture, keys, GatedBlock)
