"""Models that are not DLRMs: their embedding modules, and the dense part up to the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lab.architecture import Architecture
from predictor.errors import InputError
from predictor.model.workload import Workload
from shardopt.extras import needs_torchrec
from shardopt.training.model import Collection, embedding_modules

with needs_torchrec():
    import torch
    from torch import Tensor, nn
    from torchrec.models import deepfm, dlrm
    from torchrec.modules.crossnet import LowRankCrossNet
    from torchrec.modules.mlp import MLP

    from shardopt.training.batch import Batch

Outputs = Mapping[str, Any]
"""Module -> its outputs: a KeyedTensor, or a JaggedTensor by key."""
Keys = Mapping[str, Sequence[tuple[str, int]]]
"""Module -> key and width of each of its outputs, in the workload's order."""
COLLECTION = "ec"
"""Name of the module of sequences."""


class Body(nn.Module):
    """Dense part: (dense features, `Outputs`) -> logits ``[batch, tasks]``.

    Args:
        architecture: kind and sizes.
        keys: keys of the embedding modules' outputs.
    """

    def __init__(self, architecture: Architecture, keys: Keys) -> None:
        super().__init__()
        self.architecture, self.keys = architecture, keys

    def forward(self, dense: Tensor, labels: Tensor, outputs: Outputs) -> tuple[Tensor, Tensor]:
        """Return the mean binary cross-entropy over the batch and its tasks, which share labels,
        and the logits."""
        logits = self.logits(dense, outputs)
        targets = labels.unsqueeze(-1).expand_as(logits)
        return nn.functional.binary_cross_entropy_with_logits(logits, targets), logits

    def logits(self, dense: Tensor, outputs: Outputs) -> Tensor:
        """Return the logits; each kind implements its own."""
        raise NotImplementedError

    def pooled(self, outputs: Outputs, *modules: str) -> list[Tensor]:
        """Return ``[batch, width]`` of every output of modules of bags.

        Outputs are looked up by key: their order in a KeyedTensor depends on the sharding plan.
        """
        return [outputs[m].to_dict()[key] for m in modules for key, _ in self.keys[m]]

    def width(self, *modules: str) -> int:
        """Return the total width of the outputs of some modules."""
        return sum(width for module in modules for _, width in self.keys[module])


class CrossBody(Body):
    """DCN-v2 (Wang et al. 2021) as `torchrec.models.dlrm.DLRM_DCN` has it.

    ``bottom``: widths of the bottom MLP before the one that tables have; ``layers`` cross layers of
    rank ``low_rank``; ``top``: widths of the top MLP, whose output follows.
    """

    def __init__(self, architecture: Architecture, keys: Keys) -> None:
        super().__init__(architecture, keys)
        (self.module,) = keys
        features, dim = len(keys[self.module]), keys[self.module][0][1]
        width = dim * (1 + features)
        layers, rank = architecture.number("layers"), architecture.number("low_rank")
        bottom = [*architecture.widths("bottom"), dim]
        self.bottom = dlrm.DenseArch(architecture.in_features, bottom)
        self.interaction = dlrm.InteractionDCNArch(features, LowRankCrossNet(width, layers, rank))
        self.over = dlrm.OverArch(width, [*architecture.widths("top"), 1])

    def logits(self, dense: Tensor, outputs: Outputs) -> Tensor:
        sparse = torch.stack(self.pooled(outputs, self.module), dim=1)
        return self.over(self.interaction(self.bottom(dense), sparse))


class FactorizationBody(Body):
    """DeepFM (Guo et al. 2017) as `torchrec.models.deepfm.SimpleDeepFMNN` has it.

    ``hidden``: width between dense features and the one that tables have; ``deep``: width of the
    deep part.
    """

    def __init__(self, architecture: Architecture, keys: Keys) -> None:
        super().__init__(architecture, keys)
        (self.module,) = keys
        names, dim = [key for key, _ in keys[self.module]], keys[self.module][0][1]
        deep = architecture.number("deep")
        self.bottom = deepfm.DenseArch(architecture.in_features, architecture.number("hidden"), dim)
        self.interaction = deepfm.FMInteractionArch((1 + len(names)) * dim, names, deep)
        self.over = deepfm.OverArch(dim + deep + 1)

    def forward(self, dense: Tensor, labels: Tensor, outputs: Outputs) -> tuple[Tensor, Tensor]:
        """Return the mean loss over the batch, and DeepFM's output probabilities."""
        # the interaction reads the keys one by one
        clicks = self.over(self.interaction(self.bottom(dense), outputs[self.module]))
        return nn.functional.binary_cross_entropy(clicks.squeeze(-1), labels), clicks


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
        dim, heads = keys[COLLECTION][0][1], architecture.number("heads")
        blocks = (block(dim, heads, self.length) for _ in range(architecture.number("blocks")))
        self.positions = nn.Parameter(0.01 * torch.randn(self.length, dim))
        self.blocks = nn.Sequential(*blocks)
        width = architecture.in_features + 2 * dim + self.width(*self.bags)
        self.top = MLP(width, [*architecture.widths("top"), 1], activation_on_last=False)

    def logits(self, dense: Tensor, outputs: Outputs) -> Tensor:
        rows = outputs[COLLECTION]
        x = self.positions + sum(self._padded(rows[key], self.length) for key in self.histories)
        encoded = self.blocks(x)
        candidate = self._padded(rows[self.candidate], 1).squeeze(1)
        bags = self.pooled(outputs, *self.bags)
        return self.top(torch.cat([dense, encoded[:, -1], candidate, *bags], dim=1))

    def _padded(self, sequences: Any, length: int) -> Tensor:
        """Pad to ``[batch, length, dim]``, with zeros behind the items of a short history."""
        padded: Tensor = torch.ops.fbgemm.jagged_to_padded_dense(
            sequences.values(), [sequences.offsets()], [length], 0.0
        )
        return padded


class TransformerBlock(nn.Module):
    """Causal self-attention and a point-wise network, each with pre-norm and residual.

    SASRec (Kang and McAuley 2018), with GELU between the two layers.
    """

    def __init__(self, dim: int, heads: int, length: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.wide, self.narrow = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        future = nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("future", future, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, dim]`` to the same."""
        normed = self.norms[0](x)
        attended, _ = self.attention(
            normed, normed, normed, attn_mask=self.future, need_weights=False
        )
        x = x + attended
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

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, length, dim]`` to the same."""
        projected = nn.functional.silu(self.project(self.norms[0](x)))
        gate, *parts = projected.chunk(4, dim=-1)
        # [batch, heads, length, dim / heads]
        value, query, key = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        scores = nn.functional.silu(query @ key.transpose(-1, -2)) * (self.past / self.length)
        attended = (scores @ value).transpose(1, 2).reshape(x.shape)
        return x + self.out(self.norms[1](attended) * gate)


class ExpertsBody(Body):
    """MMoE (Ma et al. 2018): every task weighs the outputs of all experts by its own gate.

    ``experts`` MLPs of widths ``expert``; ``tasks`` gates and towers of widths ``tower``.
    """

    def __init__(self, architecture: Architecture, keys: Keys) -> None:
        super().__init__(architecture, keys)
        width = architecture.in_features + self.width(*keys)
        experts, tasks = architecture.number("experts"), architecture.number("tasks")
        expert, tower = architecture.widths("expert"), [*architecture.widths("tower"), 1]
        self.experts = nn.ModuleList(MLP(width, expert) for _ in range(experts))
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(tasks))
        self.towers = nn.ModuleList(
            MLP(expert[-1], tower, activation_on_last=False) for _ in range(tasks)
        )

    def logits(self, dense: Tensor, outputs: Outputs) -> Tensor:
        """Return a column for each task."""
        x = torch.cat([dense, *self.pooled(outputs, *self.keys)], dim=1)
        opinions = torch.stack([expert(x) for expert in self.experts], dim=1)
        logits = []
        for gate, tower in zip(self.gates, self.towers, strict=True):
            weights = torch.softmax(gate(x), dim=1)
            logits.append(tower(torch.einsum("be,bew->bw", weights, opinions)))
        return torch.cat(logits, dim=1)


class TowersBody(Body):
    """Two embedding modules, each of one width, with a tower each, then an MLP over both.

    ``bottom``, ``first``, ``second``: widths of the MLPs of dense features and of the two modules;
    ``top``: those of the MLP over all, whose output follows.
    """

    def __init__(self, architecture: Architecture, keys: Keys) -> None:
        super().__init__(architecture, keys)
        widths = [architecture.widths(name) for name in ("bottom", "first", "second")]
        first, second = keys
        inputs = architecture.in_features, self.width(first), self.width(second)
        self.towers = nn.ModuleList(MLP(*shape) for shape in zip(inputs, widths, strict=True))
        top = [*architecture.widths("top"), 1]
        self.top = MLP(sum(layers[-1] for layers in widths), top, activation_on_last=False)

    def logits(self, dense: Tensor, outputs: Outputs) -> Tensor:
        pooled = (torch.cat(self.pooled(outputs, module), dim=1) for module in self.keys)
        towers = [tower(x) for tower, x in zip(self.towers, (dense, *pooled), strict=True)]
        return self.top(torch.cat(towers, dim=1))


BODIES: Mapping[str, Callable[[Architecture, Keys], Body]] = {
    "dcn_v2": CrossBody,
    "deepfm": FactorizationBody,
    "mmoe": ExpertsBody,
    "two_dims": TowersBody,
    "sasrec": partial(HistoryBody, block=TransformerBlock),
    "hstu": partial(HistoryBody, block=GatedBlock),
}
"""`Architecture.kind` -> its body."""


def model_facts(workload: Workload, architecture: Architecture) -> dict[str, Any]:
    """Return the facts of rows on a model that is not a DLRM: its architecture, and (in, out) of
    every `nn.Linear`."""
    body = Ranker(workload, architecture, torch.device("meta")).body
    linears = [m for m in body.modules() if isinstance(m, nn.Linear)]
    return {
        "architecture": architecture.as_dict(),
        "linears": [[layer.in_features, layer.out_features] for layer in linears],
    }


@dataclass(frozen=True)
class RankerBuilder:
    """Builder of an architecture's model; a `shardopt.training.model.ModelBuilder`."""

    architecture: Architecture

    def __call__(self, workload: Workload, device: str) -> Ranker:
        return Ranker(workload, self.architecture, torch.device(device))


class Ranker(nn.Module):
    """Model from a batch to (loss, predictions), as TorchRec's train pipelines expect.

    The embedding modules are attributes of the model under the workload's names; `body` is the
    rest.

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
            # never on meta: `DistributedModelParallel` would leave parameters without
            # `reset_parameters` uninitialised, and denormals are slow
            self.body = BODIES[architecture.kind](architecture, keys).to(
                "cpu" if device.type == "meta" else device
            )
        except (ValueError, AssertionError) as error:
            raise InputError(
                f"architecture {architecture.kind} does not fit the tables: {error}"
            ) from None

    @property
    def sparse(self) -> dict[str, Collection]:
        return {name: getattr(self, name) for name in self.names}

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the mean loss over the batch, and the predictions."""
        # start every module's lookup before waiting for the first output
        outputs = {name: module(batch.sparse[name]) for name, module in self.sparse.items()}
        loss, predicted = self.body(batch.dense, batch.labels, outputs)
        return loss, predicted
