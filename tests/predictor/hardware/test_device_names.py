"""Devices by the names that CUDA gives them."""

from __future__ import annotations

import pytest

from predictor.hardware.device_names import PROFILES, profile_of_device
from predictor.hardware.loader import list_hardware


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA H100 96GB HBM2e", "h100-96gb"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H800", "h800"),
        ("NVIDIA A10G", "a10"),
        ("AMD Instinct MI350X", "mi350x"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("Tesla V100-SXM2-32GB", "v100-32gb"),
        ("Tesla V100-SXM3-32GB", "v100-dgx2"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("Tesla T4", "t4"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_device_has_the_profile_of_its_name(name: str, profile: str | None) -> None:
    assert profile_of_device(name) == profile


def test_every_shipped_profile_is_named() -> None:
    """Except for what CUDA does not see: CPUs, and how a host joins its cards."""
    unnamed = {"cpu-gloo", "l40s-no-peers"}
    assert {profile for _, profile in PROFILES} == {*list_hardware()} - unnamed
