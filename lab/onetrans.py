"""OneTrans large, whose step on eight B200 is public kernel by kernel.

One transformer over the tokens of three histories (S) and of the sample itself (NS): S tokens share
their weights, each NS token has its own; a layer keeps fewer of the oldest S tokens than the one
before (Zhang et al. 2025, arXiv 2510.26104, sections 3.3 and 3.4). The table has the shapes of all
products; the rest follows the paper: RMSNorm before attention and feed-forward, GELU, a causal
mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from predictor.model.distribution import Zipf
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
DIM, WIDTH, HEADS, WIDER = 64, 384, 6, 1536
"""Columns of a table; of a token; heads; columns inside a feed-forward."""
HISTORIES, LENGTH, OWN = 3, 500, 16
"""Histories, events of each, NS tokens."""
KEPT = (1500, 1288, 1076, 864, 652, 440, 228, 16)
"""S tokens that each layer passes on."""
TABLES = {"item": 9_390_624, "artist": 1_293_395, "album": 3_367_692}
USERS = 1_000_001
DENSE, TEXT, PLAIN = 18, 128, 12
"""Dense features: those of a first layer, those of a second layer, and those without one."""
BATCH = 1024
ALPHA = 0.85
"""Zipf exponent of the ids: with it, the first eighth of each table's rows, on the traced rank,
gives the bytes that the rank exchanged."""


class PerToken(nn.Module):
    """Linear layer for each NS token: ``[batch, OWN, inputs]`` to ``[batch, OWN, outputs]``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(OWN, inputs, outputs, device=META))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x.transpose(0, 1), self.weight).transpose(0, 1)


class Mixed(nn.Module):
    """Linear layer shared by all S tokens, and one for each NS token, which come last."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.shared = nn.Linear(inputs, outputs, bias=False, device=META)
        self.own = PerToken(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.shared(x[:, :-OWN]), self.own(x[:, -OWN:])], dim=1)


class Layer(nn.Module):
    """Attention of the remaining tokens to all, then a feed-forward."""

    def __init__(self, remaining: int) -> None:
        super().__init__()
        self.remaining = remaining + OWN
        self.before, self.between = (nn.RMSNorm(WIDTH, device=META) for _ in range(2))
        self.qkv = Mixed(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False, device=META)
        self.wider, self.narrower = Mixed(WIDTH, WIDER), Mixed(WIDER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        q = q[:, -self.remaining :]
        heads = (projection.transpose(1, 2) for projection in (q, k, v))
        # the mask aligns the last query with the last key; no other PyTorch function does
        attended = torch.ops.aten._scaled_dot_product_flash_attention(*heads, 0.0, True)[0]
        x = x[:, -self.remaining :] + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.narrower(functional.gelu(self.wider(self.between(x))))


class OneTrans(nn.Module):
    """Model from histories and a sample's own features to the loss."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=DIM,
                feature_names=[name, *(f"{name}_{i}" for i in range(HISTORIES))],
            )
            for name, rows in TABLES.items()
        ]
        user = EmbeddingConfig(
            name="uid", num_embeddings=USERS, embedding_dim=DIM, feature_names=["uid"]
        )
        self.tables = EmbeddingCollection([*tables, user], device=META)
        self.events = nn.ModuleList(
            nn.Sequential(
                nn.Linear(len(TABLES) * DIM, WIDTH, device=META),
                nn.GELU(),
                nn.Linear(WIDTH, WIDTH, device=META),
            )
            for _ in range(HISTORIES)
        )
        self.dense, self.text = (nn.Linear(n, DIM, device=META) for n in (DENSE, TEXT))
        self.sample = nn.Sequential(
            nn.Linear((len(TABLES) + 3) * DIM + PLAIN, OWN * WIDTH, device=META),
            nn.GELU(),
            nn.Linear(OWN * WIDTH, OWN * WIDTH, device=META),
        )
        self.layers = nn.ModuleList(map(Layer, KEPT))
        self.norm = nn.RMSNorm(WIDTH, device=META)
        self.head = nn.Sequential(
            nn.Linear(OWN * WIDTH, WIDTH, device=META),
            nn.GELU(),
            nn.Linear(WIDTH, 1, device=META),
        )

    def forward(self, features: Tensor, ids: KeyedJaggedTensor, labels: Tensor) -> Tensor:
        embeddings: Mapping[str, JaggedTensor] = self.tables(ids)
        batch = len(features)
        histories = []
        for i, layer in enumerate(self.events):
            event = torch.cat([embeddings[f"{name}_{i}"].values() for name in TABLES], dim=1)
            histories.append(layer(event.view(batch, LENGTH, -1)))
        dense, text, plain = features.split([DENSE, TEXT, PLAIN], dim=1)
        single = [embeddings[name].values() for name in (*TABLES, "uid")]
        own = torch.cat([*single, self.dense(dense), self.text(text), plain], dim=1)
        tokens = self.sample(own).unflatten(1, (OWN, WIDTH))
        x = torch.cat([*histories, tokens], dim=1)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x[:, -OWN:]).flatten(1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(logits, labels)


@cache
def one_trans() -> Workload:
    """Return the traced model as `to_yaml` captures it: autocast, compiled, popular ids first."""
    every = [1.0, *(float(LENGTH) for _ in range(HISTORIES))]
    ids = dict.fromkeys(TABLES, ParameterConstraints(pooling_factors=every))
    ids["uid"] = ParameterConstraints(pooling_factors=[1.0])
    module = OneTrans()
    features = [name for table in module.tables.embedding_configs() for name in table.feature_names]
    lengths = {name: LENGTH if "_" in name else 1 for name in features}
    more = {"batch_size": BATCH, "constraints": ids, "train_pipeline": "sparse_dist"}
    return compiled_ranker(module, lengths, DENSE + TEXT + PLAIN, _with_data, **more)


def _with_data(table: Table) -> Table:
    """Return a table whose popular ids come first."""
    features = (replace(f, distribution=Zipf(ALPHA), id_order="frequency") for f in table.features)
    return replace(table, features=tuple(features))
