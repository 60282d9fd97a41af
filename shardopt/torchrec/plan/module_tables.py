"""The tables of a user's module, with what their configs say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardopt.extras import needs_torchrec

with needs_torchrec():
    from torch import nn
    from torchrec.modules.embedding_modules import (
        EmbeddingBagCollectionInterface,
        EmbeddingCollectionInterface,
    )

# Modules that TorchRec shards as a whole although the tables lie in a child: the plan names them.
_WRAPPED = ("_embedding_bag_collection", "_embedding_module")


@dataclass(frozen=True)
class ModuleTable:
    """A table of the user's module: where the plan for it goes, and what it looks like.

    Args:
        path: of the module that TorchRec shards.
        pooling: sum, mean, or none for a table of an EmbeddingCollection.
    """

    path: str
    table: str
    shape: tuple[int, int]
    pooling: str
    features: tuple[str, ...]


def find_tables(module: nn.Module, path: str = "") -> Iterator[ModuleTable]:
    """Every table of every embedding module, in the order TorchRec walks them."""
    inner: Any = module
    for attribute in _WRAPPED:
        inner = getattr(inner, attribute, inner)
    if isinstance(inner, EmbeddingBagCollectionInterface | EmbeddingCollectionInterface):
        pooled = isinstance(inner, EmbeddingBagCollectionInterface)
        configs = inner.embedding_bag_configs() if pooled else inner.embedding_configs()
        for config in configs:
            yield ModuleTable(
                path,
                config.name,
                (config.num_embeddings, config.embedding_dim),
                config.pooling.value.lower() if pooled else "none",
                tuple(config.feature_names),
            )
        return
    for name, child in module.named_children():
        yield from find_tables(child, f"{path}.{name}" if path else name)
