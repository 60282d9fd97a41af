"""The hardware profile of the device at hand."""

from __future__ import annotations

import logging

from predictor.hardware.device_names import profile_of_device
from predictor.hardware.loader import DEFAULT_HARDWARE, HardwareProfile, load_hardware
from shardopt.extras import needs_torchrec

with needs_torchrec():
    import torch

logger = logging.getLogger("shardopt")
CPU_PROFILE = "cpu-gloo"


def detect_hardware(given: str | HardwareProfile | None, device: str) -> HardwareProfile:
    """What is given, else the profile of the GPU seen here, else the default; the choice is logged.

    Args:
        device: type of the device to plan for, ``cuda`` or ``cpu``.
    """
    if isinstance(given, HardwareProfile):
        return given
    if given is not None:
        return load_hardware(given)
    if device == "cpu":
        name, why = CPU_PROFILE, "the ranks compute on CPUs"
    else:
        seen = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
        name = (profile_of_device(seen) if seen else None) or DEFAULT_HARDWARE
        why = f"the GPU here is {seen}" if seen else "no GPU is seen here, it is the default"
    logger.info("costs are those of hardware profile %s (%s); hardware= chooses another", name, why)
    return load_hardware(name)
