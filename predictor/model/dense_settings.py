"""Settings that every form of a dense part has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from predictor.section import Flag, Section, about, choice, real, refuse

DENSE_STATES = {"sgd": 0, "adagrad": 1, "adam": 2}
"""Dense optimizer -> states as large as the parameters."""


@dataclass(frozen=True)
class LengthShares(Section):
    """Shares of forward and backward that grow with a sample's length; both together at most 1."""

    linear: Annotated[float, real(0, 1), about("share that grows with the ids of a sample")] = 0.0
    square: Annotated[
        float, real(0, 1), about("share that grows with their square, as attention does")
    ] = 0.0

    def refuse_contradictions(self) -> None:
        if self.linear + self.square > 1:
            shares = {"linear": self.linear, "square": self.square}
            raise refuse(shares, "linear and square are shares of one time, at most 1 together")


DenseOptimizer = Annotated[str, choice(DENSE_STATES)]
ProductType = Annotated[str, choice(["fp32", "tf32", "bf16"])]
BucketSize = Annotated[
    float,
    real(0, 1e6, above=True),
    about(
        "MiB of dense gradients that one all-reduce carries, as of TorchRec's "
        "`DefaultDataParallelWrapper`"
    ),
]
Compiled = Annotated[Flag, about("forward and backward are compiled (`torch.compile`)")]
CudaGraphs = Annotated[Flag, about("the device runs them as captured CUDA graphs")]
GrowthOfOps = Annotated[
    LengthShares | None,
    about("what grows with the lengths of samples; left out: as the ops say"),
]
