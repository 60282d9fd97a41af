"""Hardware profiles by the name that `torch.cuda.get_device_name` gives a device."""

from __future__ import annotations

import re

PROFILES = (
    # the first entry whose words are all in the name wins, so special cases come first
    (("GB300",), "gb300"),
    (("GB200",), "gb200"),
    (("B300",), "b300"),
    (("B200",), "b200"),
    (("H200", "NVL"), "h200-nvl"),
    (("H200",), "h200-sxm"),
    (("GH200",), "gh200"),
    (("H100", "96GB"), "h100-96gb"),
    (("H100", "PCIE"), "h100-pcie"),
    (("H100",), "h100-sxm"),
    (("A100", "PCIE"), "a100-pcie-80gb"),
    (("A100", "40GB"), "a100-40gb"),
    (("A100",), "a100-80gb"),
    (("A40",), "a40"),
    (("A30",), "a30"),
    (("L40S",), "l40s"),
    (("L40",), "l40"),
    (("L4",), "l4"),
    (("V100", "SXM3"), "v100-dgx2"),
    (("V100", "DGX", "2"), "v100-dgx2"),
    (("V100",), "v100-32gb"),
    (("T4",), "t4"),
    (("P100",), "p100-pcie-16gb"),
    (("P4",), "p4"),
    (("MI300X",), "mi300x"),
    (("GFX942",), "mi300x"),
    (("MI355X",), "mi355x"),
)


def profile_of_device(name: str) -> str | None:
    """Name of the shipped profile of a device, None if there is none.

    Args:
        name: e.g. ``NVIDIA H100 80GB HBM3`` or ``Tesla V100-SXM2-32GB``.
    """
    words = re.sub(r"[^A-Z0-9.]+", " ", name.upper()).split()
    for wanted, profile in PROFILES:
        if set(wanted) <= {*words}:
            return profile
    return None
