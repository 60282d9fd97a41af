"""A model of embedding modules and a body: what `DistributedModelParallel` shards and trains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lab.rankers.architecture import Architecture, architecture_to_dict
from lab.rankers.body import Body
from lab.rankers.crosses import CrossBody, FactorizationBody
from lab.rankers.sequences import GatedBody, TransformerBody
from lab.rankers.towers import ExpertsBody, TowersBody
from predictor.errors import InputError
from predictor.model.workload import Workload
from shardopt.extras import needs_torchrec
from shardopt.training.model import Collection, embedding_modules

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
