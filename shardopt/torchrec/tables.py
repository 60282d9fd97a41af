"""The tables of a user's module, with what their configs say."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from predictor.errors import InputError
from predictor.model.workload import Optimizer
from shardopt.extras import needs_torchrec
from shardopt.torchrec.private import feature_processors, wrapped

with needs_torchrec():
    import torch
    from torch import nn
    from torchrec import optim as torchrec_optim
    from torchrec.distributed.memory_stashing import MemoryStashingManager
    from torchrec.modules.embedding_modules import (
        EmbeddingBagCollectionInterface,
        EmbeddingCollectionInterface,
    )
    from torchrec.modules.feature_processor_ import (
        PositionWeightedModule,
        PositionWeightedModuleCollection,
    )
    from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantizedBags
    from torchrec.quant.embedding_modules import EmbeddingCollection as QuantizedSequences

SPARSE_OPTIMIZERS: dict[str, Any] = {
    Optimizer.SGD: torchrec_optim.SGD,
    Optimizer.EXACT_SGD: torchrec_optim.SGD,
    Optimizer.ROWWISE_ADAGRAD: torchrec_optim.RowWiseAdagrad,
    Optimizer.ADAGRAD: torchrec_optim.Adagrad,
    Optimizer.ADAM: torchrec_optim.Adam,
    Optimizer.PARTIAL_ROWWISE_ADAM: torchrec_optim.PartialRowWiseAdam,
    Optimizer.LAMB: torchrec_optim.LAMB,
    Optimizer.LARS_SGD: torchrec_optim.LarsSGD,
}
"""Classes by the name that model files have for them."""


@dataclass(frozen=True)
class ModuleTable:
    """A table of the user's module: where the plan for it goes, and what it looks like.

    Args:
        path: of the module that TorchRec shards.
        pooling: sum, mean, or none for a table of an EmbeddingCollection.
        data_type: of its config, which is that of the sharded table; the unsharded module holds
            every type but fp32 as fp16.
        position_weights: how many a feature processor learns, by feature.
        stash_weights: they leave the device between lookup and backward, where the train pipeline
            stashes any (torchrec 1.8 and newer).
        quantized: for inference.
    """

    path: str
    table: str
    shape: tuple[int, int]
    pooling: str
    features: tuple[str, ...]
    data_type: str = "fp32"
    position_weights: Mapping[str, int] = field(default_factory=dict)
    stash_weights: bool = False
    quantized: bool = False


def find_embedding_modules(
    module: nn.Module, path: str = ""
) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yield every embedding module in the order TorchRec walks them: its path, the module as it
    is sharded, and the collection that has the configs."""
    inner = wrapped(module)
    if isinstance(inner, EmbeddingBagCollectionInterface | EmbeddingCollectionInterface):
        yield path, module, inner
        return
    for name, child in module.named_children():
        yield from find_embedding_modules(child, f"{path}.{name}" if path else name)


def feature_processors_of(module: Any) -> tuple[dict[str, int], list[str]]:
    """Return the number of position weights of each feature (TorchRec's
    `PositionWeightedModule`), and the classes of all other feature processors."""
    processors = feature_processors(module)
    if isinstance(processors, PositionWeightedModuleCollection):
        return dict(processors.max_feature_lengths), []
    # one a feature, in a mapping or in TorchRec's `FeatureProcessorDictWrapper`
    mapping = feature_processors(processors) or processors
    by_feature = dict(mapping.items()) if hasattr(mapping, "items") else {}
    weights, unknown = {}, [] if by_feature or processors is None else [processors]
    for feature, processor in by_feature.items():
        if isinstance(processor, PositionWeightedModule):
            weights[feature] = len(processor.position_weight)
        else:
            unknown.append(processor)
    return weights, sorted({type(other).__name__ for other in unknown})


def is_pooled(collection: Any) -> bool:
    """Tell if a collection pools the ids of a sample."""
    return isinstance(collection, EmbeddingBagCollectionInterface)


def configs_of(collection: Any) -> list[Any]:
    """TorchRec's config of every table of a collection."""
    pooled = is_pooled(collection)
    configs = collection.embedding_bag_configs() if pooled else collection.embedding_configs()
    return list(configs)


def find_tables(module: nn.Module) -> Iterator[ModuleTable]:
    """Yield every table of every embedding module, in the order TorchRec walks them."""
    for path, whole, inner in find_embedding_modules(module):
        pooled, (positions, _) = is_pooled(inner), feature_processors_of(whole)
        for config in configs_of(inner):
            yield ModuleTable(
                path,
                config.name,
                (config.num_embeddings, config.embedding_dim),
                config.pooling.value.lower() if pooled else "none",
                tuple(config.feature_names),
                config.data_type.value.lower(),
                {name: positions[name] for name in config.feature_names if name in positions},
                _stashes_weights(config),
                isinstance(inner, QuantizedBags | QuantizedSequences),
            )


def _stashes_weights(config: Any) -> bool:
    """Tell if a table's weights are stashed, as TorchRec 1.9's runtime does: tables of
    `MemoryStashingManager.set_stashed_tables` come before the configs."""
    resolve = getattr(MemoryStashingManager, "resolve_stash_weights", None)
    if resolve is not None:
        return bool(resolve(config.name, config))
    return getattr(config, "stash_weights", False)


def trained_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A copy of a module, in training.

    Args:
        memo: by id, what takes the place of a part, as `copy.deepcopy` keeps it.

    Raises:
        InputError: it cannot be copied.
    """
    try:
        return copy.deepcopy(module, memo).train()
    except (TypeError, RuntimeError, AttributeError, NotImplementedError) as error:
        raise InputError(
            f"{type(module).__name__} cannot be copied, so it cannot be run: {error}"
        ) from error


WEIGHT_SCALE = 0.01


def fill_cheaply(module: nn.Module) -> None:
    """Let tables that are sharded from the meta device begin with one row everywhere.

    TorchRec's uniform start takes seconds a GiB on one core, and times do not depend on it. Every
    page is still written: pages that never were are one page of zeros, always in cache.
    """
    for _, _, inner in find_embedding_modules(module):
        for config in configs_of(inner):
            config.init_fn = _same_row_everywhere


@torch.no_grad()
def _same_row_everywhere(weight: nn.Parameter) -> None:
    # the last dimension: a rank without a shard of the table has an empty vector
    row = torch.linspace(-1, 1, weight.shape[-1], device=weight.device)
    weight.copy_((WEIGHT_SCALE * row).expand_as(weight))
