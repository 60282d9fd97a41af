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
        data_type: of its config, which is that of the sharded table; the unsharded module holds
            every type but fp32 as fp16.
    """

    path: str
    table: str
    shape: tuple[int, int]
    pooling: str
    features: tuple[str, ...]
    data_type: str = "fp32"


def find_embedding_modules(
    module: nn.Module, path: str = ""
) -> Iterator[tuple[str, nn.Module, Any]]:
    """Every embedding module in the order TorchRec walks them: its path, itself as it is sharded,
    and the collection that has the configs."""
    inner: Any = module
    for attribute in _WRAPPED:
        inner = getattr(inner, attribute, inner)
    if isinstance(inner, EmbeddingBagCollectionInterface | EmbeddingCollectionInterface):
        yield path, module, inner
        return
    for name, child in module.named_children():
        yield from find_embedding_modules(child, f"{path}.{name}" if path else name)


def is_pooled(collection: Any) -> bool:
    """Whether a collection pools the ids of a sample."""
    return isinstance(collection, EmbeddingBagCollectionInterface)


def find_tables(module: nn.Module) -> Iterator[ModuleTable]:
    """Every table of every embedding module, in the order TorchRec walks them."""
    for path, _, inner in find_embedding_modules(module):
        pooled = is_pooled(inner)
        for config in inner.embedding_bag_configs() if pooled else inner.embedding_configs():
            yield ModuleTable(
                path,
                config.name,
                (config.num_embeddings, config.embedding_dim),
                config.pooling.value.lower() if pooled else "none",
                tuple(config.feature_names),
                config.data_type.value.lower(),
            )
