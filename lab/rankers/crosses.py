"""Models of TorchRec's own modules: DCN-v2 and DeepFM."""

from __future__ import annotations

from lab.rankers.architecture import Architecture
from lab.rankers.body import Body, Found, Keys, binary_loss
from shardopt.extras import needs_torchrec

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
