"""From a model file and a machine to topology."""

from pathlib import Path

from predictor.hardware.loader import load_hardware
from shardopt.api.setting import Machine, resolve


def test_topology_has_what_the_reserve_leaves(model: Path) -> None:
    setting = resolve(model, Machine(gpus=16, hardware="a100-40gb"))
    assert (setting.topology.hosts, setting.topology.local_world_size) == (2, 8)
    assert setting.installed.hbm_cap_bytes == (load_hardware("a100-40gb").hbm_bytes,) * 16
    left = setting.topology.hbm_cap_bytes[0] / setting.installed.hbm_cap_bytes[0]
    assert 0.85 < left < 0.9
    limit = setting.topology.limit_bytes[0] / setting.installed.hbm_cap_bytes[0]
    assert 0.89 < limit < 0.9
    assert setting.hardware_from == "given"


def test_a_cluster_file_sets_the_nvlink_domain(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "pairs.yaml"
    file.write_text("schema: 1\nhosts: 2\nranks_per_host: 4\nnvlink_domain: 2\n")
    setting = resolve(model, Machine(cluster=file, hbm_gib=40))
    assert (setting.topology.world_size, setting.topology.nvlink_domain) == (8, 2)
    assert setting.installed.hbm_cap_bytes[0] == 40 * 2**30
    assert setting.hardware_from == "default"
