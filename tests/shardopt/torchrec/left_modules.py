"""Modules that no kernel model knows: our planner leaves their cost to TorchRec's own estimate."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_tower_sharding import (
    EmbeddingTowerCollectionSharder,
    EmbeddingTowerSharder,
)
from torchrec.distributed.quant_embeddingbag import QuantEmbeddingBagCollectionSharder
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantCollection

from tests.shardopt.torchrec.hook_models import Model, bag

META = torch.device("meta")


def remapped(configs: Any, size: int = 1000, buckets: int = 4) -> ManagedCollisionCollection:
    """Managed collisions of tables of a size; one bucket a rank, as TorchRec shards nothing
    else."""
    remaps = {
        config.name: MCHManagedCollisionModule(
            zch_size=size,
            device=META,
            input_hash_size=1000,
            eviction_interval=2,
            eviction_policy=DistanceLFU_EvictionPolicy(),
            buckets=buckets,
        )
        for config in configs
    }
    return ManagedCollisionCollection(remaps, configs)


def bags() -> Any:
    return Model(bag("a", 1000), bag("b", 1000)).ebc


def towers() -> nn.Module:
    pair = [EmbeddingTower(Model(bag(n, 1000)).ebc, nn.Linear(64, 64)) for n in "ab"]
    return EmbeddingTowerCollection(pair)


def quantised() -> nn.Module:
    tables = [bag("a", 1000), bag("b", 1000)]
    for table in tables:
        table.data_type = DataType.INT8
    return QuantCollection(tables, is_weighted=False, device=torch.device("cpu"))


LEFT = {
    "tower": (
        lambda: EmbeddingTower(bags(), nn.Linear(128, 64)),
        EmbeddingTowerSharder,
        "part of an embedding tower",
    ),
    "towers": (towers, EmbeddingTowerCollectionSharder, "part of an embedding tower"),
    "quantised": (quantised, QuantEmbeddingBagCollectionSharder, "compute kernels quant"),
}
