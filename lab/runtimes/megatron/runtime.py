"""What Megatron's software adds to a profile: fitted constants, kept with the rows behind them.

`predictor/hardware/runtimes/megatron.yaml` holds them; ``python -m lab fit-transformer`` fits
them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from predictor.hardware.loader import load_runtime

Configuration = tuple[int, ...]
"""Configuration of a measured row: its integer columns, in the file's order."""


@dataclass(frozen=True)
class MegatronRuntime:
    """Constants of the software; kernel times are those of the profile unless named here.

    Args:
        kernel_us: host time to launch one kernel.
        eager_factor: the same over it where each kernel is an op of PyTorch for itself.
        elementwise_factor: kernel times of dropout, layer norm, GELU, bias and residual over the
            profile's; Megatron's fused softmax runs at the profile's.
        loss_factor: kernel times of the softmax over the vocabulary over the profile's.
        misaligned_factor: time of a multiplication for each halving of the widest aligned load,
            from 16 bytes down (where a dimension is not a multiple of eight halves).
        send_gb_s: rate at which stages hand over hidden states.
    """

    kernel_us: float
    eager_factor: float
    elementwise_factor: float
    loss_factor: float
    misaligned_factor: float
    send_gb_s: float


CONSTANTS = tuple(field.name for field in fields(MegatronRuntime))


@dataclass(frozen=True)
class FittedRuntime:
    """The shipped runtime, its hardware profile, and the rows that it was fitted on."""

    runtime: MegatronRuntime
    hardware: str
    rows: frozenset[Configuration]


@cache
def load_megatron() -> FittedRuntime:
    """What `predictor/hardware/runtimes/megatron.yaml` holds."""
    found: dict[str, Any] = load_runtime("megatron")
    runtime = MegatronRuntime(**{name: float(found["constants"][name]) for name in CONSTANTS})
    rows = frozenset(tuple(int(v) for v in row) for row in found["fit_rows"])
    return FittedRuntime(runtime, str(found["hardware"]), rows)
