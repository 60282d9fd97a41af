"""From a module to a sharding plan, for a model that is no DLRM.

    python examples/plan_any_model.py --gpus 16

The ranker has 40 sparse features: plain and weighted bags, and histories of up to 100 items that go
through two transformer layers and target attention; then low-rank crosses and a tower for each
task. Nothing is trained and no memory is taken: the module lies on the meta device, its training
step runs once on fake tensors, and the search needs the model file alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.crossnet import LowRankCrossNet
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mlp import MLP
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from shardopt.cli import app
from shardopt.torchrec import to_yaml

META = torch.device("meta")
DIM = 128
LENGTH = 100
DENSE = 64
TASKS = ("click", "like", "share")
BAGS = {f"bag_{i}": 10 ** (3 + i % 5) for i in range(30)}
WEIGHTED = {f"interest_{i}": 10**6 for i in range(4)}
SEQUENCES = {"item": 20_000_000, "author": 5_000_000, "category": 10_000}
"""Rows of the tables; a history and its target share one."""
IDS = {**dict.fromkeys(BAGS, 3.0), **dict.fromkeys(WEIGHTED, 20.0)}
MEAN_LENGTH = 60.0


class History(nn.Module):
    """Two transformer layers over what the user saw, and attention of the target to it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.empty(LENGTH, DIM, device=device))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                DIM, 4, 4 * DIM, dropout=0.0, batch_first=True, norm_first=True, device=device
            )
            for _ in range(2)
        )
        self.attention = nn.MultiheadAttention(DIM, 4, batch_first=True, device=device)

    def forward(self, seen: list[JaggedTensor], target: Tensor) -> Tensor:
        """``[batch, DIM]`` of jagged sequences and the target's ``[batch, DIM]``."""
        x = self.positions + torch.stack([of.to_padded_dense(LENGTH) for of in seen]).sum(0)
        for layer in self.layers:
            x = layer(x)
        attended, _ = self.attention(target.unsqueeze(1), x, x, need_weights=False)
        return attended.squeeze(1)


class Ranker(nn.Module):
    """Sparse features, histories, crosses and a tower a task; gives back the loss."""

    def __init__(self, device: torch.device = META) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection([_bag(*item) for item in BAGS.items()], device=device)
        self.interests = EmbeddingBagCollection(
            [_bag(*item) for item in WEIGHTED.items()], is_weighted=True, device=device
        )
        self.sequences = EmbeddingCollection(
            [
                EmbeddingConfig(
                    name=f"t_{name}",
                    num_embeddings=rows,
                    embedding_dim=DIM,
                    feature_names=[f"seen_{name}", f"target_{name}"],
                )
                for name, rows in SEQUENCES.items()
            ],
            device=device,
        )
        self.dense = MLP(DENSE, [256, DIM], device=device)
        self.history = History(device)
        width = DIM * (len(BAGS) + len(WEIGHTED) + 3)
        self.cross = LowRankCrossNet(width, num_layers=3, low_rank=256)
        self.shared = MLP(width, [1024, 512], device=device)
        self.towers = nn.ModuleDict(
            {
                task: nn.Sequential(
                    MLP(512, [256, 128], device=device), nn.Linear(128, 1, device=device)
                )
                for task in TASKS
            }
        )

    def forward(
        self,
        dense: Tensor,
        sparse: KeyedJaggedTensor,
        weighted: KeyedJaggedTensor,
        labels: Tensor,
    ) -> Tensor:
        """Mean loss of all tasks, which here share their labels."""
        bags, interests = self.bags(sparse), self.interests(weighted)
        found = self.sequences(sparse)
        # a sample has one target, so its ids are the batch
        target = torch.stack([found[f"target_{name}"].values() for name in SEQUENCES]).sum(0)
        history = self.history([found[f"seen_{name}"] for name in SEQUENCES], target)
        x = torch.cat(
            [bags.values(), interests.values(), self.dense(dense), history, target], dim=1
        )
        x = self.shared(self.cross(x))
        logits = [tower(x).squeeze(1) for tower in self.towers.values()]
        losses = [functional.binary_cross_entropy_with_logits(y, labels) for y in logits]
        return torch.stack(losses).mean()


def _bag(name: str, rows: int) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=f"t_{name}", num_embeddings=rows, embedding_dim=DIM, feature_names=[name]
    )


def ids_per_sample() -> dict[str, ParameterConstraints]:
    """Mean ids of every feature, which no module holds."""
    bags = {f"t_{name}": ParameterConstraints(pooling_factors=[n]) for name, n in IDS.items()}
    both = {
        f"t_{name}": ParameterConstraints(pooling_factors=[MEAN_LENGTH, 1.0]) for name in SEQUENCES
    }
    return {**bags, **both}


def main() -> None:
    """Write the model file of the ranker and plan it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, default=16)
    parser.add_argument("--hardware", default="h100-sxm")
    parser.add_argument("--batch-size", type=int, default=2048, help="samples per rank")
    parser.add_argument("--effort", type=float, default=0.1, help="of the search; 1 is shardopt's")
    parser.add_argument("--folder", type=Path, help="for the files; by default one that is deleted")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        model = folder / "ranker.yaml"
        start = time.perf_counter()
        to_yaml(
            Ranker(),
            model,
            batch_size=given.batch_size,
            constraints=ids_per_sample(),
            train_pipeline="sparse_dist",
            dense_optimizer="adam",
        )
        print(f"captured in {time.perf_counter() - start:.1f} s: {model} and {model.stem}.ops.json")
        flags = ["--gpus", given.gpus, "--hardware", given.hardware, "--effort", given.effort]
        code = app.main(["plan", str(model), *map(str, flags)])
        sys.exit(code)


if __name__ == "__main__":
    main()
