"""What follows the embedding modules of a model: from their outputs to the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.architecture import Architecture, architecture_to_dict
from predictor.errors import InputError
from predictor.model.workload import Workload
from shardopt.extras import needs_torchrec
from shardopt.training.model import Collection, embedding_modules

with needs_torchrec():
    import torch
    from torch import nn

Found = Mapping[str, Any]
"""Module -> its outputs: a KeyedTensor, or a JaggedTensor by key."""
Keys = Mapping[str, Sequence[tuple[str, int]]]
"""Module -> key and width of each of its outputs, in the workload's order."""


class Body(nn.Module):
    """A dense part: (dense features, labels, `Found`) -> (loss, logits).

    Args:
        architecture: kind and sizes.
        keys: of the embedding modules' outputs.
    """

    def __init__(self, architecture: Architecture, keys: Keys) -> None:
        super().__init__()
        self.architecture, self.keys = architecture, keys

    def pooled(self, found: Found, module: str) -> list[torch.Tensor]:
        """``[batch, width]`` of every output of a module of bags.

        Taken by key: the order inside a KeyedTensor depends on the sharding plan.
        """
        by_key = found[module].to_dict()
        return [by_key[key] for key, _ in self.keys[module]]

    def width(self, module: str) -> int:
        """Of all outputs of a module side by side."""
        return sum(width for _, width in self.keys[module])


def binary_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean binary cross-entropy of ``[batch, tasks]``, each task with the same labels."""
    targets = labels.unsqueeze(-1).expand_as(logits)
    return nn.functional.binary_cross_entropy_with_logits(logits, targets)


with needs_torchrec():
    import torch
    from torch import nn
    from torchrec.models import deepfm, dlrm
    from torchrec.modules.crossnet import LowRankCrossNet
    from torchrec.sparse.jagged_tensor import KeyedTensor


class CrossBody(Body):
    """DCN-v2 (Wang et al. 2021) as `torchrec.models.dlrm.DLRM_DCN` has it.

    ``bottom``: widths of the bottom MLP before the one that tables have; ``layers`` cross layers of
    rank ``low_rank``; ``top``: widths of the top MLP, whose output follows.
    """

    def __init__(self, architecture: Architecture, keys: Keys) -> None:
        super().__init__(architecture, keys)
        (self.module,) = keys
        features = len(keys[self.module])
        dim = keys[self.module][0][1]
        width = dim * (1 + features)
        cross = LowRankCrossNet(
            width, architecture.number("layers"), architecture.number("low_rank")
        )
        self.bottom = dlrm.DenseArch(
            architecture.in_features, [*architecture.widths("bottom"), dim]
        )
        self.interaction = dlrm.InteractionDCNArch(features, cross)
        self.over = dlrm.OverArch(width, [*architecture.widths("top"), 1])

    def forward(
        self, dense: torch.Tensor, labels: torch.Tensor, found: Found
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean loss over the batch, and the logits."""
        sparse = torch.stack(self.pooled(found, self.module), dim=1)
        logits = self.over(self.interaction(self.bottom(dense), sparse))
        return binary_loss(logits, labels), logits


class FactorizationBody(Body):
    """DeepFM (Guo et al. 2017) as `torchrec.models.deepfm.SimpleDeepFMNN` has it.

    ``hidden``: width between dense features and the one that tables have; ``deep``: width of the
    deep part.
    """

    def __init__(self, architecture: Architecture, keys: Keys) -> None:
        super().__init__(architecture, keys)
        (self.module,) = keys
        names = [key for key, _ in keys[self.module]]
        dim = keys[self.module][0][1]
        deep = architecture.number("deep")
        self.bottom = deepfm.DenseArch(architecture.in_features, architecture.number("hidden"), dim)
        self.interaction = deepfm.FMInteractionArch((1 + len(names)) * dim, names, deep)
        self.over = deepfm.OverArch(dim + deep + 1)

    def forward(
        self, dense: torch.Tensor, labels: torch.Tensor, found: Found
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean loss over the batch, and the probabilities."""
        # the interaction asks for one key after the other
        sparse: KeyedTensor = found[self.module]
        clicks = self.over(self.interaction(self.bottom(dense), sparse))
        return nn.functional.binary_cross_entropy(clicks.squeeze(-1), labels), clicks


with needs_torchrec():
    import torch
    from torch import nn
    from torchrec.modules.mlp import MLP

COLLECTION = "ec"
"""The module of the sequences."""


class HistoryBody(Body):
    """Histories, summed over features and encoded, beside the candidate, bags and dense features.

    Args:
        block: class of the encoder's blocks, made with (width, heads, length).
    """

    def __init__(self, architecture: Architecture, keys: Keys, block: type[nn.Module]) -> None:
        super().__init__(architecture, keys)
        self.length = architecture.number("length")
        self.bags = [module for module in keys if module != COLLECTION]
        *self.histories, self.candidate = (key for key, _ in keys[COLLECTION])
        dim = keys[COLLECTION][0][1]
        heads = architecture.number("heads")
        self.positions = nn.Parameter(0.01 * torch.randn(self.length, dim))
        self.blocks = nn.Sequential(
            *(block(dim, heads, self.length) for _ in range(architecture.number("blocks")))
        )
        width = architecture.in_features + 2 * dim + sum(self.width(m) for m in self.bags)
        self.top = MLP(width, [*architecture.widths("top"), 1], activation_on_last=False)

    def forward(
        self, dense: torch.Tensor, labels: torch.Tensor, found: Found
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean loss over the batch, and the logits."""
        rows = found[COLLECTION]
        x = self.positions + sum(self._padded(rows[key], self.length) for key in self.histories)
        encoded = self.blocks(x)
        candidate = self._padded(rows[self.candidate], 1).squeeze(1)
        pooled = [output for module in self.bags for output in self.pooled(found, module)]
        features = torch.cat([dense, encoded[:, -1], candidate, *pooled], dim=1)
        logits = self.top(features)
        return binary_loss(logits, labels), logits

    def _padded(self, sequences: Any, length: int) -> torch.Tensor:
        """``[batch, length, dim]``; zeros behind the items of a short history."""
        padded: torch.Tensor = torch.ops.fbgemm.jagged_to_padded_dense(
            sequences.values(), [sequences.offsets()], [length], 0.0
        )
        return padded


class TransformerBlock(nn.Module):
    """Causal self-attention and a point-wise network, each normed before and added after.

    SASRec (Kang and McAuley 2018), with GELU between the two layers.
    """

    def __init__(self, dim: int, heads: int, length: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.wide, self.narrow = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        future = nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("future", future, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, length, dim]`` to the same."""
        normed = self.norms[0](x)
        seen, _ = self.attention(normed, normed, normed, attn_mask=self.future, need_weights=False)
        x = x + seen
        return x + self.narrow(nn.functional.gelu(self.wide(self.norms[1](x))))


class GatedBlock(nn.Module):
    """HSTU's layer (Zhai et al. 2024, eq. 1-3): attention by SiLU in place of softmax, and gates.

    Without the relative bias of positions and times.
    """

    def __init__(self, dim: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads, self.length = heads, length
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.project, self.out = nn.Linear(dim, 4 * dim), nn.Linear(dim, dim)
        self.register_buffer("past", torch.ones(length, length).tril(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``[batch, length, dim]`` to the same."""
        projected = nn.functional.silu(self.project(self.norms[0](x)))
        gate, value, query, key = projected.chunk(4, dim=-1)
        query, key, value = (self._by_head(part) for part in (query, key, value))
        scores = nn.functional.silu(query @ key.transpose(-1, -2)) * (self.past / self.length)
        seen = (scores @ value).transpose(1, 2).reshape(x.shape)
        return x + self.out(self.norms[1](seen) * gate)

    def _by_head(self, part: torch.Tensor) -> torch.Tensor:
        """``[batch, heads, length, dim / heads]``."""
        return part.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class TransformerBody(HistoryBody):
    """SASRec-like: a causal transformer over the history."""

    def __init__(self, architecture: Architecture, keys: Keys) -> None:
        super().__init__(architecture, keys, TransformerBlock)


class GatedBody(HistoryBody):
    """HSTU-like: gated attention over the history."""

    def __init__(self, architecture: Architecture, keys: Keys) -> None:
        super().__init__(architecture, keys, GatedBlock)


with needs_torchrec():
    import torch
    from torch import nn
    from torchrec.modules.mlp import MLP


def _mlp(width: int, layers: list[int], *, bare_last: bool = False) -> nn.Module:
    return MLP(width, layers, activation_on_last=not bare_last)


class ExpertsBody(Body):
    """MMoE (Ma et al. 2018): every task weighs the outputs of all experts by a gate of its own.

    ``experts`` MLPs of widths ``expert``; ``tasks`` gates and towers of widths ``tower``.
    """

    def __init__(self, architecture: Architecture, keys: Keys) -> None:
        super().__init__(architecture, keys)
        width = architecture.in_features + sum(self.width(module) for module in keys)
        experts, tasks = architecture.number("experts"), architecture.number("tasks")
        expert, tower = architecture.widths("expert"), [*architecture.widths("tower"), 1]
        self.experts = nn.ModuleList(_mlp(width, expert) for _ in range(experts))
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(tasks))
        self.towers = nn.ModuleList(_mlp(expert[-1], tower, bare_last=True) for _ in range(tasks))

    def forward(
        self, dense: torch.Tensor, labels: torch.Tensor, found: Found
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean loss over the batch and tasks, and the logits."""
        pooled = [output for module in self.keys for output in self.pooled(found, module)]
        x = torch.cat([dense, *pooled], dim=1)
        opinions = torch.stack([expert(x) for expert in self.experts], dim=1)
        logits = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            weights = torch.softmax(gate(x), dim=1)
            logits.append(tower(torch.einsum("be,bew->bw", weights, opinions)))
        joined = torch.cat(logits, dim=1)
        return binary_loss(joined, labels), joined


class TowersBody(Body):
    """Two embedding modules, each of one width, with a tower each, then an MLP over both.

    ``bottom``, ``first``, ``second``: widths of the MLPs of dense features and of the two modules;
    ``top``: those of the MLP over all, whose output follows.
    """

    def __init__(self, architecture: Architecture, keys: Keys) -> None:
        super().__init__(architecture, keys)
        self.first, self.second = keys
        widths = [architecture.widths(name) for name in ("bottom", "first", "second")]
        given = architecture.in_features, self.width(self.first), self.width(self.second)
        self.towers = nn.ModuleList(
            _mlp(width, layers) for width, layers in zip(given, widths, strict=True)
        )
        top = [*architecture.widths("top"), 1]
        self.top = _mlp(sum(layers[-1] for layers in widths), top, bare_last=True)

    def forward(
        self, dense: torch.Tensor, labels: torch.Tensor, found: Found
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean loss over the batch, and the logits."""
        pooled = (torch.cat(self.pooled(found, m), dim=1) for m in (self.first, self.second))
        towers = [tower(x) for tower, x in zip(self.towers, (dense, *pooled), strict=True)]
        logits = self.top(torch.cat(towers, dim=1))
        return binary_loss(logits, labels), logits


with needs_torchrec():
    import torch
    from torch import nn

    from shardopt.training.batch import Batch

BODIES: Mapping[str, type[Body]] = {
    "dcn_v2": CrossBody,
    "deepfm": FactorizationBody,
    "mmoe": ExpertsBody,
    "two_dims": TowersBody,
    "sasrec": TransformerBody,
    "hstu": GatedBody,
}
"""By `Architecture.kind`."""


def linear_layers(workload: Workload, architecture: Architecture) -> list[list[int]]:
    """(in, out) of every `nn.Linear` of the model, which tell little of what it runs."""
    body = Ranker(workload, architecture, torch.device("meta")).body
    linears = (m for m in body.modules() if isinstance(m, nn.Linear))
    return [[layer.in_features, layer.out_features] for layer in linears]


def model_facts(workload: Workload, architecture: Architecture) -> dict[str, Any]:
    """What rows say of a model that is no DLRM: its architecture and its linear layers."""
    return {
        "architecture": architecture_to_dict(architecture),
        "linears": linear_layers(workload, architecture),
    }


@dataclass(frozen=True)
class RankerBuilder:
    """Makes the model of an architecture; a `shardopt.training.model.ModelBuilder`."""

    architecture: Architecture

    def __call__(self, workload: Workload, device: str) -> Ranker:
        """The whole model, unsharded."""
        return Ranker(workload, self.architecture, torch.device(device))


class Ranker(nn.Module):
    """Batch -> (loss, predictions), which is what TorchRec's train pipelines expect of a model.

    The embedding modules are attributes of the model, by the names that the workload has for them;
    `body` is all else.

    Raises:
        InputError: the architecture and the tables do not fit together.
    """

    def __init__(
        self, workload: Workload, architecture: Architecture, device: torch.device
    ) -> None:
        super().__init__()
        collections, keys = embedding_modules(workload, device)
        for name, collection in collections.items():
            if hasattr(self, name) or name == "body":
                raise InputError(f"an embedding module cannot be called '{name}' here; rename it")
            self.add_module(name, collection)
        self.names = tuple(collections)
        try:
            # never on meta: `DistributedModelParallel` would leave what has no `reset_parameters`
            # as the memory was, and denormals are slow
            self.body = BODIES[architecture.kind](architecture, keys).to(
                "cpu" if device.type == "meta" else device
            )
        except (ValueError, AssertionError) as error:
            raise InputError(
                f"architecture {architecture.kind} does not fit the tables: {error}"
            ) from None

    @property
    def sparse(self) -> dict[str, Collection]:
        """The embedding modules by name."""
        return {name: getattr(self, name) for name in self.names}

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean loss over the batch, and the predictions."""
        # every module's lookup starts before the first output is waited for
        found = {name: module(batch.sparse[name]) for name, module in self.sparse.items()}
        loss, predicted = self.body(batch.dense, batch.labels, found)
        return loss, predicted
