"""Under our plan every table is stepped by what steps it under TorchRec's, and learns the same.

Tables are stepped by RowWiseAdagrad in the backward, all else by SGD over what
`in_backward_optimizer_filter` leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchrec
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from shardopt.torchrec import ShardoptPlanner
from tests.distributed.ranks import on_ranks
from tests.distributed.test_training import load_weights

pytestmark = pytest.mark.distributed

STEPS, BATCH, DIM, ROWS, FEW, LONGEST = 20, 16, 8, 50, 2, 3
NAMES = ("t0", "t1", "t2", "t3")
CPU = torch.device("cpu")
Told = dict[str, ParameterConstraints]


def configs(kind: Any, names: tuple[str, ...], rows: int = ROWS) -> list[Any]:
    return [
        kind(name=n, num_embeddings=rows, embedding_dim=DIM, feature_names=[f"f_{n}"])
        for n in names
    ]


def bags(*names: str, rows: int = ROWS, **more: Any) -> torchrec.EmbeddingBagCollection:
    tables = configs(EmbeddingBagConfig, names, rows)
    return torchrec.EmbeddingBagCollection(tables=tables, device=CPU, **more)


class Interaction(nn.Module):
    """A layer over the embeddings of a tower."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, embeddings: Any) -> torch.Tensor:
        output: torch.Tensor = self.layer(embeddings.values())
        return output


def pooled(embeddings: Any) -> torch.Tensor:
    """By name: a sharded collection has its features in the order of their shards."""
    return torch.cat([embeddings[name] for name in sorted(embeddings.keys())], 1)


def summed(embeddings: Any) -> torch.Tensor:
    """Sequences, summed over each sample."""
    sums = [
        torch.segment_reduce(jagged.values(), "sum", lengths=jagged.lengths(), initial=0)
        for _, jagged in sorted(embeddings.items())
    ]
    return torch.cat(sums, 1)


def as_it_is(embeddings: Any) -> torch.Tensor:
    return embeddings + 0.0  # whatever is awaited


class Model(nn.Module):
    """A layer over what each part gives, and a loss."""

    def __init__(self, *parts: tuple[nn.Module, Callable[[Any], torch.Tensor]]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(part for part, _ in parts)
        self.flatten = [flatten for _, flatten in parts]
        self.over = nn.LazyLinear(1)

    def forward(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        outputs = [part(sparse) for part in self.parts]
        flat = [flatten(out) for flatten, out in zip(self.flatten, outputs, strict=True)]
        loss: torch.Tensor = self.over(torch.cat(flat, 1)).sigmoid().log().neg().mean()
        return loss


def sequences() -> Model:
    tables = configs(EmbeddingConfig, NAMES)
    return Model((torchrec.EmbeddingCollection(tables=tables, device=CPU), summed))


def towers() -> Model:
    pair = [EmbeddingTower(bags(name), Interaction()) for name in NAMES[2:]]
    return Model((bags(*NAMES[:2]), pooled), (EmbeddingTowerCollection(pair), as_it_is))


def position_weighted() -> Model:
    lengths = {f"f_{name}": LONGEST for name in NAMES}
    processor = PositionWeightedModuleCollection(lengths, device=CPU)
    ebc = bags(*NAMES, is_weighted=True)
    return Model((FeatureProcessedEmbeddingBagCollection(ebc, processor), pooled))


def collections(*modules: torchrec.EmbeddingBagCollection) -> Model:
    return Model(*((collection, pooled) for collection in modules))


FEW_ROWS = "replicated by TorchRec"
ASKED = {"t0": ParameterConstraints(sharding_types=["data_parallel"], pooling_factors=[2.0])}
KINDS: dict[str, tuple[Callable[[], Model], Told]] = {
    "pooled": (lambda: collections(bags(*NAMES)), {}),
    "weighted": (lambda: collections(bags(*NAMES, is_weighted=True)), {}),
    "sequences": (sequences, {}),
    "two modules": (lambda: collections(bags(*NAMES[:2]), bags(*NAMES[2:])), {}),
    "towers": (towers, {}),
    "position weighted": (position_weighted, {}),
    FEW_ROWS: (lambda: collections(bags(*NAMES, rows=FEW)), {}),
    "replicated as asked": (lambda: collections(bags(*NAMES)), ASKED),
}
DENSE = {"replicated as asked": {"t0"}, FEW_ROWS: set(NAMES)}
"""Tables that the dense optimizer steps, under TorchRec's plan as under ours."""


def batch(rank: int, step: int, rows: int) -> KeyedJaggedTensor:
    """Return a batch of all features with 1 to `LONGEST` ids per sample."""
    generator = torch.Generator().manual_seed(rank + 100 * step)
    lengths = torch.randint(1, LONGEST + 1, (len(NAMES) * BATCH,), generator=generator)
    count = int(lengths.sum())
    return KeyedJaggedTensor(
        keys=[f"f_{name}" for name in NAMES],
        values=torch.randint(0, rows, (count,), generator=generator),
        lengths=lengths,
        weights=torch.rand(count, generator=generator),
    )


def train(kind: str, planner: Any) -> dict[str, Any]:
    """Losses of this rank, and the names of what SGD steps."""
    (make, constraints), rank = KINDS[kind], dist.get_rank()
    sharders = get_default_sharders()
    torch.manual_seed(0)
    model = make()
    rows = FEW if kind == FEW_ROWS else ROWS
    model(batch(rank, 0, rows))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    tables = [p for name, p in model.named_parameters() if name.split(".")[-2] in NAMES]
    apply_optimizer_in_backward(RowWiseAdagrad, tables, {"lr": 0.1})
    plan = planner(constraints).collective_plan(model, sharders, dist.group.WORLD)
    sharded = DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)
    load_weights(sharded, start)
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    optimizer = torch.optim.SGD(dense.values(), lr=0.5)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = sharded(batch(rank, step, rows))
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    kernels = {
        name: of_table.compute_kernel
        for of_module in plan.plan.values()
        for name, of_table in of_module.items()
    }
    return {"losses": losses, "dense": sorted(dense), "kernels": kernels}


def train_under_both() -> dict[str, dict[str, Any]]:
    """Modules of every kind under TorchRec's plan and under ours."""
    ranks = Topology(world_size=2, compute_device="cpu")
    planners: dict[str, Any] = {
        "theirs": lambda told: EmbeddingShardingPlanner(
            topology=ranks, batch_size=BATCH, constraints=told, debug=False
        ),
        "ours": lambda told: ShardoptPlanner(
            ranks, BATCH, constraints=told, debug=False, effort=0.01, cache=False
        ),
    }
    return {
        kind: {whose: train(kind, planner) for whose, planner in planners.items()} for kind in KINDS
    }


def test_two_ranks_lose_what_they_lose_under_torchrecs_plan() -> None:
    """Replicated, a table would leave RowWiseAdagrad for SGD and part from the second step on."""
    for losses in on_ranks(train_under_both):
        for kind, of_kind in losses.items():
            ours, theirs = of_kind["ours"], of_kind["theirs"]
            assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5), kind
            assert ours["losses"][-1] < ours["losses"][0], kind
            assert ours["dense"] == theirs["dense"], kind
            dense = {table for table, kernel in ours["kernels"].items() if kernel == "dense"}
            assert dense == DENSE.get(kind, set()), kind
