"""Models of several towers: a mixture of experts for several tasks, and one tower a module."""

from __future__ import annotations

from lab.rankers.architecture import Architecture
from lab.rankers.body import Body, Found, Keys, binary_loss
from shardopt.extras import needs_torchrec

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
