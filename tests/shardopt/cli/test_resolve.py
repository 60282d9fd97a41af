"""From flags to topology."""

from pathlib import Path

import pytest

from predictor.hardware import load_hardware
from shardopt.cli.resolve import Flags, nvlink_domain, resolve


@pytest.mark.parametrize(
    ("domain", "host", "ranks", "local", "expected"),
    [
        (8, 8, 8, 8, 8),
        (8, 8, 16, 8, 8),
        (8, 8, 4, 4, 4),  # a world smaller than the domain
        (8, 8, 1, 1, 1),
        (8, 8, 16, 4, 4),  # hosts of four: their NVLink does not leave them
        (8, 8, 16, 16, 8),  # two islands in a host
        (8, 8, 12, 12, 6),  # the largest equal islands
        (2, 8, 8, 8, 2),  # NVLink pairs
        (2, 8, 3, 3, 1),
        (72, 4, 16, 4, 16),  # a rack: all hosts
        (72, 4, 144, 4, 72),
        (72, 4, 80, 4, 40),  # equal groups of whole hosts
        (72, 4, 2, 2, 2),
    ],
)
def test_nvlink_domain(domain: int, host: int, ranks: int, local: int, expected: int) -> None:
    profile = load_hardware("h100-sxm").model_copy(
        update={"nvlink_domain": domain, "gpus_per_host": host}
    )
    assert nvlink_domain(profile, ranks, local) == expected


def test_topology_has_what_the_reserve_leaves(model: Path) -> None:
    setting = resolve(model, Flags(gpus=16, hardware="a100-40gb"))
    assert (setting.topology.hosts, setting.topology.local_world_size) == (2, 8)
    assert setting.installed.hbm_cap_bytes == (load_hardware("a100-40gb").hbm_bytes,) * 16
    left = setting.topology.hbm_cap_bytes[0] / setting.installed.hbm_cap_bytes[0]
    assert 0.8 < left < 0.85
    assert setting.hardware_from == "--hardware"


def test_a_cluster_file_sets_the_nvlink_domain(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "pairs.yaml"
    file.write_text("schema: 1\nhosts: 2\nranks_per_host: 4\nnvlink_domain: 2\n")
    setting = resolve(model, Flags(cluster=file, hbm_gib=40))
    assert (setting.topology.world_size, setting.topology.nvlink_domain) == (8, 2)
    assert setting.installed.hbm_cap_bytes[0] == 40 * 2**30
    assert setting.hardware_from == "default"
