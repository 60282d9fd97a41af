"""Hardware profiles by the name that `torch.cuda.get_device_name` gives a device."""

from __future__ import annotations

import re

from predictor.hardware.loader import load_table

PROFILES: list[tuple[str, str]] = load_table("device_names")


def profile_of_device(name: str) -> str | None:
    """Return the name of a device's shipped profile, None if there is none.

    Args:
        name: e.g. ``NVIDIA H100 80GB HBM3`` or ``Tesla V100-SXM2-32GB``.
    """
    words = {*re.sub(r"[^A-Z0-9.]+", " ", name.upper()).split()}
    return next((profile for pattern, profile in PROFILES if {*pattern.split()} <= words), None)
