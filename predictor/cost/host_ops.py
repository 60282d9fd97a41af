"""TorchRec's work on the host, stage by stage.

`predictor/hardware/runtimes/torchrec.yaml` holds the figures with their source.
"""

from __future__ import annotations

from dataclasses import dataclass

from predictor.hardware.loader import load_runtime


@dataclass(frozen=True)
class HostOps:
    """Framework ops per stage of an iteration, in units of the profile's time of one op.

    Args:
        copy: of the batch to the device.
        permute, splits, ids, recat: of one exchange's input distribution, in its order.
        lookup, lookup_backward: of one fused lookup.
        output, output_backward: of one collective of an output distribution.
        concat: of the outputs of all exchanges, and the same backward.
        op, view: of one op of the dense part that launches kernels, and of one that does not.
        gradient_sync: of one bucket of gradients.
        step, step_per_parameter: of the dense optimizer.
    """

    copy: float
    permute: float
    splits: float
    ids: float
    recat: float
    lookup: float
    lookup_backward: float
    output: float
    output_backward: float
    concat: float
    op: float
    view: float
    gradient_sync: float
    step: float
    step_per_parameter: float


HOST_OPS = HostOps(**load_runtime("torchrec")["host_ops"])
