"""A real TorchRec model from a workload: the DLRM that the model file describes.

Every layer is Linear then ReLU, but for the last of the top MLP; the pooled embeddings meet the
bottom output in `dot`, `concat` or low-rank DCN v2; the loss is binary cross-entropy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

from predictor.errors import InputError
from predictor.model.workload import DcnV2, DenseArch, Table, Workload
from shardopt.extras import needs_torchrec
from shardopt.torchrec.private import wrapped
from shardopt.torchrec.tables import configs_of

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
    from torchrec.sparse.jagged_tensor import JaggedTensor

    from shardopt.training.batch import Batch, check_poolings

Collection: TypeAlias = (
    "EmbeddingBagCollection | EmbeddingCollection | FeatureProcessedEmbeddingBagCollection"
)


def embedding_modules(
    workload: Workload, device: torch.device
) -> tuple[dict[str, Collection], dict[str, list[tuple[str, int]]]]:
    """Build every embedding module, by name, and list the key and width of each of its outputs.

    Raises:
        InputError: a module or a table cannot be built, e.g. weighted beside unweighted tables.
    """
    tables = {m: [t for t in workload.tables if t.module == m] for m in workload.modules}
    for name, group in tables.items():
        _check_name("module", name)
        for table in group:
            _check_name("table", table.name)
    collections = {name: _collection(name, group, device) for name, group in tables.items()}
    return collections, {name: _outputs(collections[name], group) for name, group in tables.items()}


def _check_name(kind: str, name: str) -> None:
    """torch's ModuleDict, in which TorchRec keeps tables by name, refuses some with a KeyError."""
    if "." in name or hasattr(nn.ModuleDict, name) or name == "training":
        raise InputError(
            f"{kind} '{name}': PyTorch cannot hold a module of that name "
            "(no dots, no names of its own such as 'items' or 'type'); rename it"
        )


def _collection(name: str, tables: Sequence[Table], device: torch.device) -> Collection:
    for flag in ("is_pooled", "weighted"):
        if len({getattr(table, flag) for table in tables}) > 1:
            word = "pooling none" if flag == "is_pooled" else "weighted"
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
    collection = EmbeddingBagCollection(bags, is_weighted=tables[0].weighted, device=device)
    counts = {f.name: f.position_weights for t in tables for f in t.features if f.position_weights}
    if not counts:
        return collection
    processors = PositionWeightedModuleCollection(counts, device=device)
    return FeatureProcessedEmbeddingBagCollection(collection, processors)


def _config(table: Table) -> dict[str, Any]:
    check_poolings(table)
    return {
        "name": table.name,
        "num_embeddings": table.num_embeddings,
        "embedding_dim": table.embedding_dim,
        "data_type": DataType[table.data_type.upper()],
        "feature_names": [feature.name for feature in table.features],
    }


def _outputs(collection: Collection, tables: Sequence[Table]) -> list[tuple[str, int]]:
    """Key and width of every output; a feature of two tables has `feature@table` as keys."""
    names = get_embedding_names_by_table(configs_of(wrapped(collection)))
    return [
        (key, table.embedding_dim)
        for table, keys in zip(tables, names, strict=True)
        for key in keys
    ]


ModelBuilder = Callable[[Workload, str], nn.Module]
"""Workload and device -> unsharded model whose `sparse` holds its embedding modules by name."""


def build_model(workload: Workload, device: str | torch.device = "meta") -> DLRM:
    """The workload's model, unsharded; on `meta` its tables hold no memory.

    Args:
        device: where the parameters lie; `DistributedModelParallel` materialises those on `meta`.

    Raises:
        InputError: the model cannot be built, e.g. `dot` over tables of several widths.
    """
    return DLRM(workload, torch.device(device))


class DLRM(nn.Module):
    """Batch -> (loss, logits), which is what TorchRec's train pipelines expect of a model."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        super().__init__()
        dense = workload.dlrm
        collections, self.outputs = embedding_modules(workload, device)
        self.sparse = nn.ModuleDict(collections)
        self.unpooled = frozenset(t.module for t in workload.tables if not t.is_pooled)
        self.autocast = dense.data_type == "bf16"

        widths = [width for outputs in self.outputs.values() for _, width in outputs]
        self.bottom = _mlp([dense.in_features, *dense.bottom_mlp], device)
        self.interaction, width = _interaction(dense, widths, device)
        self.top = _mlp([width, *dense.top_mlp], device, bare_last=True)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean loss over the batch, and the logits."""
        pooled = self.lookup(batch)
        # not the batch's device: TorchRec's pipelines trace this with proxies
        device = "cuda" if self.autocast and torch.cuda.is_available() else "cpu"
        with torch.autocast(device, torch.bfloat16, enabled=self.autocast):
            logits = self.top(self.interaction([self.bottom(batch.dense), *pooled])).float()
        labels = batch.labels.unsqueeze(-1).expand_as(logits)
        return nn.functional.binary_cross_entropy_with_logits(logits, labels), logits

    def lookup(self, batch: Batch) -> list[torch.Tensor]:
        """Return one `[batch, width]` tensor per table and feature, in the workload's order.

        Taken by key: the order inside a KeyedTensor depends on the sharding plan.
        """
        # every module's lookup starts before the first output is waited for
        looked_up = {name: module(batch.sparse[name]) for name, module in self.sparse.items()}
        result: list[torch.Tensor] = []
        for name, outputs in self.outputs.items():
            if name in self.unpooled:
                result += [_sum_sequences(looked_up[name][key]) for key, _ in outputs]
            else:
                by_key = looked_up[name].to_dict()
                result += [by_key[key] for key, _ in outputs]
        return [tensor.float() for tensor in result]


def _sum_sequences(sequences: JaggedTensor) -> torch.Tensor:
    """Sum of each sample's embeddings; zeros for a sample without ids."""
    values, lengths = sequences.values(), sequences.lengths()
    return torch.segment_reduce(values.float(), "sum", lengths=lengths, initial=0.0)


class Dot(nn.Module):
    """The bottom output and all pairwise dots of it and the pooled embeddings.

    Args:
        pairs: as `DenseArch.pairs`.
        width: of the output.
    """

    def __init__(self, vectors: int, device: torch.device, pairs: str, width: int) -> None:
        super().__init__()
        self.how, self.width, self.vectors = pairs, width, vectors
        # never on meta: DistributedModelParallel would materialise a buffer as zeros
        where = "cpu" if device.type == "meta" else device
        picked = torch.triu_indices(vectors, vectors, offset=1, device=where)
        if pairs == "gather":
            picked = (picked[0] * vectors + picked[1]).unsqueeze(0)
        self.register_buffer("pairs", picked, persistent=False)

    def forward(self, vectors: list[torch.Tensor]) -> torch.Tensor:
        """`[batch, width + pairs]` of vectors of one width; the first is the bottom output."""
        stacked = torch.stack([vector.to(vectors[0].dtype) for vector in vectors], dim=1)
        dots = torch.bmm(stacked, stacked.transpose(1, 2))
        if self.how == "index":
            return torch.cat([vectors[0], dots[:, self.pairs[0], self.pairs[1]]], dim=1)
        flat = dots.flatten(1)
        if self.how == "gather":
            flat = torch.gather(flat, 1, self.pairs.expand(flat.shape[0], -1))
        missing = self.width - vectors[0].shape[1] - flat.shape[1]
        joined = torch.cat([vectors[0], flat], dim=1)
        return nn.functional.pad(joined, (0, missing)) if missing else joined


class Concat(nn.Module):
    """Bottom output and pooled embeddings side by side."""

    def forward(self, vectors: list[torch.Tensor]) -> torch.Tensor:
        """`[batch, sum of widths]`."""
        return torch.cat([vector.to(vectors[0].dtype) for vector in vectors], dim=1)


class LowRankCross(nn.Module):
    """Low-rank cross layers over the concatenation: `x0 * (U V x + b) + x` (Wang et al. 2021)."""

    def __init__(self, width: int, shape: DcnV2, device: torch.device) -> None:
        super().__init__()
        rank, layers = shape.low_rank_dim, range(shape.layers)
        self.concat = Concat()
        self.down = nn.ModuleList(nn.Linear(width, rank, bias=False, device=device) for _ in layers)
        self.up = nn.ModuleList(nn.Linear(rank, width, device=device) for _ in layers)

    def forward(self, vectors: list[torch.Tensor]) -> torch.Tensor:
        """`[batch, sum of widths]`."""
        x = first = self.concat(vectors)
        for down, up in zip(self.down, self.up, strict=True):
            x = first * up(down(x)) + x
        return x


def _interaction(
    dense: DenseArch, widths: Sequence[int], device: torch.device
) -> tuple[nn.Module, int]:
    """The interaction and the width of what it puts out."""
    if dense.linears:
        raise InputError(
            "dense.linears does not say how the layers are wired, so no model can be built of "
            "them; give bottom_mlp, interaction and top_mlp to train it"
        )
    bottom = dense.bottom_mlp[-1]
    width = bottom + sum(widths)
    if isinstance(dense.interaction, DcnV2):
        return LowRankCross(width, dense.interaction, device), width
    if dense.interaction == "concat":
        return Concat(), width
    other_widths = sorted({*widths} - {bottom})
    if other_widths:
        raise InputError(
            f"interaction dot needs one width, but the bottom MLP ends in {bottom} and tables have "
            f"embedding_dim {', '.join(map(str, other_widths))}; make them equal, or use concat"
        )
    joined = dense.joined_width(bottom, 1 + len(widths))
    return Dot(1 + len(widths), device, dense.pairs, joined), joined


def _mlp(widths: Sequence[int], device: torch.device, *, bare_last: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following, device=device), nn.ReLU()]
    return nn.Sequential(*(layers[:-1] if bare_last else layers))
