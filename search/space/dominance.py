"""Options that cannot be part of a better plan, taken out with their reason."""

from __future__ import annotations

from dataclasses import replace

from predictor.model.plan import ComputeKernel
from predictor.model.topology import Topology
from search.space.enumerate import Option, Pruned, Space

UVM = (ComputeKernel.FUSED_UVM, ComputeKernel.FUSED_UVM_CACHING)
AMPLE = 0.7
"""Share of all device memory below which everything fits without host memory."""


def drop_uvm(space: Space, topology: Topology) -> Space:
    """Without UVM kernels if device memory is ample: they cost time and save only memory.

    Tables for which nothing else is left keep them.
    """
    need = sum(min(_hbm(o) for o in options) for options in map(_on_device, space.options))
    if need > AMPLE * sum(topology.hbm_cap_bytes):
        return space
    pruned = list(space.pruned)
    kept = []
    for key, options in zip(space.keys, space.options, strict=True):
        stay = _on_device(options)
        kept.append(stay)
        reason = f"device memory is ample: the tables take {need} bytes of HBM without it"
        pruned += [Pruned(key, o.label, reason) for o in options if o not in stay]
    return replace(space, options=tuple(kept), pruned=tuple(pruned))


def _on_device(options: tuple[Option, ...]) -> tuple[Option, ...]:
    return tuple(o for o in options if o.compute_kernel not in UVM) or options


def _hbm(option: Option) -> int:
    return sum(m.hbm_bytes for m in option.memory)
