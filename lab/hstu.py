"""NVIDIA's HSTU ranker, whose step on 2 x 8 H100 is public (recsys-examples, examples/hstu).

`numpy.random.zipf` draws the ids without an upper end: two fifths of them are beyond 50 million and
hardly ever repeat, so they miss every cache. Lengths are drawn the same way, but cut.

Item and action embeddings alternate behind three tokens of context; eight layers of pointwise
projections to U, V, Q and K, causal attention, a norm that gates by U, a projection back, and a
residual (Zhai et al. 2024, eq. 1 to 3). Attention is SDPA's, whose products are HSTU's: its SiLU in
place of a softmax is a pointwise op inside the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np

from predictor.model.distribution import Distribution, Empirical, Uniform, Zipf
from predictor.model.workload import Table, Workload
from shardopt.extras import needs_torchrec

with needs_torchrec():
    import torch
    from torch import Tensor, nn
    from torch.nn import functional
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.modules.embedding_configs import EmbeddingConfig
    from torchrec.modules.embedding_modules import EmbeddingCollection
    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

    from lab.captured import compiled_ranker

META = torch.device("meta")
DIM, WIDTH, HEADS, LAYERS = 128, 1024, 4, 8
ITEMS, CONTEXT = 2048, 3
TOKENS = 2 * ITEMS + CONTEXT
HEAD, TASKS = 512, 8
BATCH = 32
ALPHA = 1.05
HASHED = {"item": 50_000_000, "user_id": 50_000_000}
"""Tables of dynamicemb, in host memory with a cache of a tenth of their rows."""
COPIED = {"action": 100, "user_age": 100, "item_category_l1": 50}
SEQUENCES = ("item", "action")
CACHED = 0.1


def beyond(most: int, alpha: float) -> float:
    """Return the share of an unbounded Zipf distribution beyond a number."""
    first = np.arange(1, 1000.0) ** -alpha
    whole = first.sum() + (1000 - 0.5) ** (1 - alpha) / (alpha - 1)
    return float((most + 0.5) ** (1 - alpha) / (alpha - 1) / whole)


def endless(rows: int) -> Distribution:
    """Return a distribution of unbounded ids on rows; ids beyond the last are spread evenly."""
    inside, rare = Zipf(ALPHA).bins(rows), beyond(rows, ALPHA)
    weights = inside.probs * (1 - rare) + rare / rows
    return Empirical(tuple(inside.counts.tolist()), tuple(weights.tolist()))


class Layer(nn.Module):
    """Block of pointwise projections, attention and gating."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = (nn.LayerNorm(WIDTH, device=META) for _ in range(2))
        self.uvqk = nn.Linear(WIDTH, 4 * WIDTH, device=META)
        self.out = nn.Linear(WIDTH, WIDTH, device=META)

    def forward(self, x: Tensor) -> Tensor:
        u, v, q, k = functional.silu(self.uvqk(self.before(x))).chunk(4, dim=-1)
        heads = (projection.unflatten(-1, (HEADS, -1)).transpose(1, 2) for projection in (q, k, v))
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True)
        gated = self.after(attended.transpose(1, 2).flatten(2)) * u
        return x + self.out(functional.dropout(gated, 0.2))


class Hstu(nn.Module):
    """Model from sequences and context to the loss of eight tasks."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
            for name, rows in (HASHED | COPIED).items()
        ]
        self.tables = EmbeddingCollection(tables, device=META)
        self.wider = nn.Linear(DIM, WIDTH, device=META)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Sequential(
            nn.Linear(WIDTH, HEAD, device=META), nn.ReLU(), nn.Linear(HEAD, TASKS, device=META)
        )

    def forward(self, features: Tensor, ids: KeyedJaggedTensor, labels: Tensor) -> Tensor:
        embeddings: Mapping[str, JaggedTensor] = self.tables(ids)
        batch = len(features)
        pairs = [embeddings[name].values().view(batch, ITEMS, DIM) for name in SEQUENCES]
        context = [
            embeddings[name].values().view(batch, 1, DIM) for name in ("user_id", *list(COPIED)[1:])
        ]
        tokens = torch.stack(pairs, dim=2).flatten(1, 2)
        x = self.wider(torch.cat([*context, tokens], dim=1))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x[:, CONTEXT::2])
        targets = labels.view(batch, 1, 1).expand(-1, ITEMS, TASKS)
        return functional.binary_cross_entropy_with_logits(logits.float(), targets)


@cache
def hstu() -> Workload:
    """Return the model as `to_yaml` captures it under autocast, with its storage of tables."""
    lengths = {name: ITEMS if name in SEQUENCES else 1 for name in (*HASHED, *COPIED)}
    constraints = {n: ParameterConstraints(pooling_factors=[float(c)]) for n, c in lengths.items()}
    more = {"batch_size": BATCH, "constraints": constraints}
    return compiled_ranker(Hstu(), lengths, 1, _with_data, **more)


def _with_data(table: Table) -> Table:
    """Return a table with its storage, and the ids that the benchmark draws."""
    return replace(
        table,
        optimizer="adam",
        storage="dynamicemb" if table.name in HASHED else "torchrec",
        features=tuple(
            replace(f, distribution=endless(HASHED[f.name]) if f.name in HASHED else Uniform())
            for f in table.features
        ),
    )
