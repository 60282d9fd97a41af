"""The embedding modules of a workload, unsharded, and the names of what they put out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from predictor.errors import InputError
from predictor.model.workload import Table, Workload
from shardopt.extras import needs_torchrec
from shardopt.torchrec.plan.module_tables import collection_of, is_pooled

with needs_torchrec():
    import torch
    from torch import nn
    from torchrec.modules.embedding_configs import (
        DataType,
        EmbeddingBagConfig,
        EmbeddingConfig,
        PoolingType,
    )
    from torchrec.modules.embedding_modules import (
        EmbeddingBagCollection,
        EmbeddingCollection,
        get_embedding_names_by_table,
    )
    from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
    from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection


Collection: TypeAlias = (
    "EmbeddingBagCollection | EmbeddingCollection | FeatureProcessedEmbeddingBagCollection"
)


def embedding_modules(
    workload: Workload, device: torch.device
) -> tuple[dict[str, Collection], dict[str, list[tuple[str, int]]]]:
    """Every embedding module by name, and key and width of each of its outputs.

    Raises:
        InputError: a module or a table cannot be built, e.g. weighted beside unweighted tables.
    """
    tables = {m: [t for t in workload.tables if t.module == m] for m in workload.modules}
    for name, of in tables.items():
        _check_name("module", name)
        for table in of:
            _check_name("table", table.name)
    collections = {name: _collection(name, of, device) for name, of in tables.items()}
    return collections, {name: _outputs(collections[name], of) for name, of in tables.items()}


def _check_name(what: str, name: str) -> None:
    """torch's ModuleDict, in which TorchRec keeps tables by name, refuses some with a KeyError."""
    if "." in name or hasattr(nn.ModuleDict, name) or name == "training":
        raise InputError(
            f"{what} '{name}': PyTorch cannot hold a module of that name "
            "(no dots, no names of its own such as 'items' or 'type'); rename it"
        )


def _collection(name: str, tables: Sequence[Table], device: torch.device) -> Collection:
    for what in ("is_pooled", "weighted"):
        if len({getattr(table, what) for table in tables}) > 1:
            word = "pooling none" if what == "is_pooled" else "weighted"
            raise InputError(
                f"module '{name}' has tables with and without {word}; "
                "give them modules of their own"
            )
    if not tables[0].is_pooled:
        if len({table.embedding_dim for table in tables}) > 1:
            raise InputError(
                f"module '{name}' has pooling none and several embedding_dims; an "
                "EmbeddingCollection has one: give each embedding_dim a module of its own"
            )
        configs = [EmbeddingConfig(**_config(table)) for table in tables]
        return EmbeddingCollection(configs, device=device)
    bags = [
        EmbeddingBagConfig(**_config(t), pooling=PoolingType[t.pooling.upper()]) for t in tables
    ]
    made = EmbeddingBagCollection(bags, is_weighted=tables[0].weighted, device=device)
    counts = {f.name: f.position_weights for t in tables for f in t.features if f.position_weights}
    if not counts:
        return made
    processors = PositionWeightedModuleCollection(counts, device=device)
    return FeatureProcessedEmbeddingBagCollection(made, processors)


def _config(table: Table) -> dict[str, Any]:
    for feature in table.features:
        if feature.num_poolings != 1:
            raise InputError(
                f"feature '{feature.name}' of table '{table.name}' has num_poolings "
                f"{feature.num_poolings:g}; only models with 1 can be run"
            )
    return {
        "name": table.name,
        "num_embeddings": table.num_embeddings,
        "embedding_dim": table.embedding_dim,
        "data_type": DataType[table.data_type.upper()],
        "feature_names": [feature.name for feature in table.features],
    }


def _outputs(collection: Collection, tables: Sequence[Table]) -> list[tuple[str, int]]:
    """Key and width of every output; a feature of two tables has `feature@table` as keys."""
    inner = collection_of(collection)
    pooled = is_pooled(inner)
    configs = inner.embedding_bag_configs() if pooled else inner.embedding_configs()
    names = get_embedding_names_by_table(configs)
    return [
        (key, table.embedding_dim)
        for table, keys in zip(tables, names, strict=True)
        for key in keys
    ]
