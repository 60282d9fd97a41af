"""Transformers with real, timed training steps: BERT-, GPT-2- and XLNet-like.

Small implementations with the ops that the public ones issue in eager mode: attention as batched
products and a softmax, dropout everywhere, BERT's normalisation after and GPT-2's before each part,
GPT-2's weights as ``[in, out]`` and its GELU as a chain of elementwise ops, XLNet's relative
positions with their shift. Sources: Devlin et al. 2019, Radford et al. 2019, Yang et al. 2019.
"""

from __future__ import annotations

import math

from lab.transformers import TransformerShape
from shardopt.extras import needs_torchrec

with needs_torchrec():
    import torch
    from torch import Tensor, nn
    from torch.nn import functional

DROPOUT = 0.1
MASKED = -1e9
DEVIATION = 0.02
SEEN = 1e-8


class _Feed(nn.Module):
    """Linear, GELU, linear."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.down(functional.gelu(self.up(x))), DROPOUT)


class _BertLayer(nn.Module):
    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.feed = _Feed(width, shape.inner)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (
            _split(layer(x), self.heads) for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]) + mask
        weights = functional.dropout(functional.softmax(scores, dim=-1), DROPOUT)
        x = self.norm1(x + functional.dropout(self.out(_join(weights @ value)), DROPOUT))
        return torch.as_tensor(self.norm2(x + self.feed(x)))


class Bert(nn.Module):
    """Masked language model over all positions."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        width = shape.width
        self.words = nn.Embedding(shape.vocabulary, width)
        self.positions = nn.Embedding(shape.sequence, width)
        self.types = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(_BertLayer(shape) for _ in range(shape.layers))
        self.transform, self.head_norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.decoder = nn.Linear(width, shape.vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """``[batch, sequence]`` ids to the loss."""
        batch, length = ids.shape
        places = torch.arange(length)
        kinds = torch.zeros_like(ids)
        mask = (1.0 - torch.ones(batch, 1, 1, length)) * MASKED
        x = self.words(ids) + self.types(kinds) + self.positions(places)
        x = functional.dropout(self.norm(x), DROPOUT)
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.decoder(self.head_norm(functional.gelu(self.transform(x))))
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), ids.view(-1))


class _Conv1D(nn.Module):
    """GPT-2's linear layer: its weight is ``[in, out]``."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, out) * DEVIATION)
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], -1)


class _GptLayer(nn.Module):
    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        width = shape.width
        self.heads = shape.heads
        self.joint, self.out = _Conv1D(width, 3 * width), _Conv1D(width, width)
        self.up, self.down = _Conv1D(width, shape.inner), _Conv1D(shape.inner, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, causal: Tensor) -> Tensor:
        parts = self.joint(self.norm1(x)).split(x.shape[-1], dim=2)
        query, key, value = (_split(part, self.heads) for part in parts)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])
        scores = torch.where(causal, scores, torch.full([], MASKED))
        weights = functional.dropout(functional.softmax(scores, dim=-1), DROPOUT)
        x = x + functional.dropout(self.out(_join(weights @ value)), DROPOUT)
        return x + functional.dropout(self.down(_gelu_new(self.up(self.norm2(x)))), DROPOUT)


def _gelu_new(x: Tensor) -> Tensor:
    """GELU by its tanh approximation, op by op (Hendrycks and Gimpel 2016)."""
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


class Gpt2(nn.Module):
    """Causal language model whose output layer shares the weight of the word embedding."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        width = shape.width
        self.words = nn.Embedding(shape.vocabulary, width)
        self.positions = nn.Embedding(shape.sequence, width)
        self.layers = nn.ModuleList(_GptLayer(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        """``[batch, sequence]`` ids to the loss."""
        length = ids.shape[1]
        places = torch.arange(length)
        causal = torch.ones(length, length, dtype=torch.bool).tril().view(1, 1, length, length)
        x = functional.dropout(self.words(ids) + self.positions(places), DROPOUT)
        for layer in self.layers:
            x = layer(x, causal)
        logits = functional.linear(self.norm(x), self.words.weight)
        shifted = logits[..., :-1, :].contiguous()
        targets = ids[..., 1:].contiguous()
        return functional.cross_entropy(shifted.view(-1, shifted.shape[-1]), targets.view(-1))


class _XlnetLayer(nn.Module):
    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        width, heads = shape.width, shape.heads
        head = width // heads
        names = ("query", "key", "value", "out", "relative")
        self.projections = nn.ParameterDict(
            {name: nn.Parameter(torch.randn(width, heads, head) * DEVIATION) for name in names}
        )
        self.content_bias = nn.Parameter(torch.zeros(heads, head))
        self.position_bias = nn.Parameter(torch.zeros(heads, head))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.feed = _Feed(width, shape.inner)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """``x`` is ``[sequence, batch, width]``, positions ``[2 sequence, batch, width]``."""
        weights = self.projections
        query, key, value = (
            torch.einsum("ibh,hnd->ibnd", x, weights[name]) for name in ("query", "key", "value")
        )
        relative = torch.einsum("ibh,hnd->ibnd", positions, weights["relative"])
        content = torch.einsum("ibnd,jbnd->bnij", query + self.content_bias, key)
        placed = torch.einsum("ibnd,jbnd->bnij", query + self.position_bias, relative)
        scores = (content + _shift(placed, len(x))) * (1 / math.sqrt(query.shape[-1]))
        shares = functional.dropout(functional.softmax(scores, dim=3), DROPOUT)
        mixed = torch.einsum("bnij,jbnd->ibnd", shares, value)
        out = functional.dropout(torch.einsum("ibnd,hnd->ibh", mixed, weights["out"]), DROPOUT)
        x = self.norm1(out + x)
        return torch.as_tensor(self.norm2(self.feed(x) + x))


def _shift(placed: Tensor, length: int) -> Tensor:
    """Move row i by i positions: XLNet's relative shift."""
    batch, heads, rows, columns = placed.shape
    moved = placed.reshape(batch, heads, columns, rows)[:, :, 1:, :]
    moved = moved.reshape(batch, heads, rows, columns - 1)
    return torch.index_select(moved, 3, torch.arange(length))


class Xlnet(nn.Module):
    """Transformer-XL attention in one stream, predicting every position."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(_XlnetLayer(shape) for _ in range(shape.layers))
        self.decoder = nn.Linear(shape.width, shape.vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        """``[batch, sequence]`` ids to the loss."""
        ids = ids.transpose(0, 1).contiguous()
        length, batch = ids.shape
        x = functional.dropout(self.words(ids), DROPOUT)
        positions = functional.dropout(self._positions(length, batch, x.shape[-1]), DROPOUT)
        for layer in self.layers:
            x = layer(x, positions)
        logits = self.decoder(functional.dropout(x, DROPOUT))
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), ids.view(-1))

    def _positions(self, length: int, batch: int, width: int) -> Tensor:
        places = torch.arange(length, -length, -1.0)
        rates = 1 / torch.pow(10000, torch.arange(0, width, 2.0) / width)
        angles = torch.einsum("i,d->id", places, rates)
        both = torch.cat([torch.sin(angles), torch.cos(angles)], dim=-1)
        return both[:, None, :].expand(-1, batch, -1)


def _split(x: Tensor, heads: int) -> Tensor:
    batch, length, width = x.shape
    return x.view(batch, length, heads, width // heads).permute(0, 2, 1, 3)


def _join(x: Tensor) -> Tensor:
    batch, heads, length, head = x.shape
    return x.permute(0, 2, 1, 3).contiguous().view(batch, length, heads * head)


MODELS: dict[str, type[nn.Module]] = {"bert": Bert, "gpt2": Gpt2, "xlnet": Xlnet}


def _small(module: nn.Module) -> None:
    """Draw weights as BERT does; larger ones drive probabilities into slow denormal numbers."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=DEVIATION)


class Training:
    """Model with its optimizer and one batch, after its first step."""

    def __init__(self, shape: TransformerShape) -> None:
        torch.manual_seed(0)
        self.model = MODELS[shape.family](shape)
        self.model.apply(_small)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.ids = torch.randint(shape.vocabulary, (shape.batch, shape.sequence))
        self.step()
        # as after many steps, with no moment at zero: roots of zero are slow
        for state in self.optimizer.state.values():
            state["exp_avg_sq"].add_(SEEN)

    def step(self) -> None:
        """Run one step: gradients to None, forward, backward, optimizer."""
        self.optimizer.zero_grad(set_to_none=True)
        self.model(self.ids).backward()
        self.optimizer.step()
