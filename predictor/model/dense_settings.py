"""Settings that every form of a dense part has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from predictor.section import Flag, Section, choice, real, refuse

DENSE_STATES = {"sgd": 0, "adagrad": 1, "adam": 2}
"""Dense optimizer -> states as large as the parameters."""


@dataclass(frozen=True)
class LengthShares(Section):
    """Shares of forward and backward that grow with a sample's length; both together at most 1."""

    linear: Annotated[float, real(0, 1)] = 0.0
    """Share that grows with the ids of a sample."""
    square: Annotated[float, real(0, 1)] = 0.0
    """Share that grows with their square, as attention does."""

    def refuse_contradictions(self) -> None:
        if self.linear + self.square > 1:
            shares = {"linear": self.linear, "square": self.square}
            raise refuse(shares, "linear and square are shares of one time, at most 1 together")


DenseOptimizer = Annotated[str, choice(DENSE_STATES)]
ProductType = Annotated[str, choice(["fp32", "tf32", "bf16"])]


@dataclass(frozen=True, kw_only=True)
class DensePart(Section):
    """Settings of a dense part in any form."""

    bucket_cap_mb: Annotated[float, real(0, 1e6, above=True)] = 25.0
    """MiB of dense gradients that one all-reduce carries, as of TorchRec's
    `DefaultDataParallelWrapper`."""
    length_shares: LengthShares | None = None
    """Shares that grow with the lengths of samples; left out: as the ops say, and nothing of
    measured times."""


@dataclass(frozen=True, kw_only=True)
class ComputedDense(DensePart):
    """Settings of a dense part whose ops are known."""

    compiled: Flag = False
    """Forward and backward are compiled (`torch.compile`), which joins memory-bound ops."""
    cuda_graphs: Flag = False
    """The device runs them as captured CUDA graphs, one launch each."""
