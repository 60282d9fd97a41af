"""From a model file and a machine to topology."""

from pathlib import Path

import pytest

from predictor.errors import InputError, PlanError
from predictor.hardware.loader import load_hardware
from predictor.hardware.networks import Network
from predictor.model.plan import ComputeKernel, ShardingPlan
from predictor.units import gib
from search.constraint_costs import relaxed
from search.space.enumerate import reduced_space
from shardopt.api.request import Machine
from shardopt.api.setting import resolve

CONFIGS = Path(__file__).parents[3] / "configs"
MIXED = """\
schema: 1
hosts: [{name: a, hardware: h100-sxm}, b]
ranks_per_host: 2
hardware: a100-40gb
"""


def test_topology_has_what_the_reserve_leaves(model: Path) -> None:
    setting = resolve(model, Machine(gpus=16, hardware="a100-40gb"))
    assert (setting.topology.hosts, setting.topology.local_world_size) == (2, 8)
    assert setting.installed.hbm_cap_bytes == (load_hardware("a100-40gb").hbm_bytes,) * 16
    usable = setting.topology.hbm_cap_bytes[0] / setting.installed.hbm_cap_bytes[0]
    assert 0.85 < usable < 0.9
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


def test_a_width_that_fused_kernels_refuse_is_no_constraint_of_the_user(
    model: Path, tmp_path: Path
) -> None:
    text = model.read_text().replace("embedding_dim: 64", "embedding_dim: 6")
    text = text.replace("interaction: dot", "interaction: concat")
    trained, served = tmp_path / "trained.yaml", tmp_path / "served.yaml"
    trained.write_text(text)
    served.write_text(f"{text}\nmode: inference\n")
    kernels = {}
    for path in (trained, served):
        setting = resolve(path, Machine(gpus=2))
        assert relaxed(setting.problem()) is None
        space = reduced_space(setting.problem())
        kernels[path] = {o.compute_kernel for options in space.options for o in options}
    assert kernels == {trained: {ComputeKernel.DENSE}, served: {ComputeKernel.FUSED}}


def test_levels_reach_the_topology(model: Path) -> None:
    setting = resolve(
        model, Machine(cluster=CONFIGS / "clusters" / "a100_oversubscribed_pods.yaml")
    )
    assert [level.name for level in setting.topology.network] == ["leaf", "pods"]
    assert setting.installed.network == setting.topology.network


def test_mixed_hosts_have_their_own_memory_and_the_slowest_times(
    model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(MIXED)
    mixed = resolve(model, Machine(cluster=path))
    assert (mixed.hardware.name, mixed.hardware_name) == ("h100-sxm + a100-40gb", "a100-40gb")
    assert mixed.installed.hbm_cap_bytes == (gib(80),) * 2 + (gib(40),) * 2
    uniform = resolve(model, Machine(cluster=path, hardware="h100-sxm"))
    assert uniform.hardware.name == "h100-sxm"
    assert set(uniform.installed.hbm_cap_bytes) == {gib(80)}


@pytest.mark.parametrize(("pooling_factor", "is_noted"), [("1e-200", True), ("0.001", False)])
def test_a_feature_that_hardly_any_batch_reads_is_told(
    model: Path, pooling_factor: str, is_noted: bool
) -> None:
    text = model.read_text()
    model.write_text(text.replace("pooling_factor: 20", f"pooling_factor: {pooling_factor}"))
    notes = resolve(model, Machine(gpus=2)).notes
    assert any("item" in note and pooling_factor in note for note in notes) is is_noted


def test_a_named_network_takes_the_place_of_the_profile_s(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "roce.yaml"
    file.write_text("schema: 1\nhosts: 2\nranks_per_host: 8\nnetwork: {kind: roce}\n")
    named = resolve(model, Machine(cluster=file, network="tcpx"))
    assert named.network == Network("tcpx")
    own = load_hardware(named.hardware_name)
    assert named.hardware == Network("tcpx").joins(own)
    assert named.facts()["network"] == {"kind": "tcpx", "per_gpu_gbps": None}
    assert resolve(model, Machine(cluster=file)).network == Network("roce")
    assert "network" not in resolve(model, Machine(gpus=16)).facts()


@pytest.mark.parametrize(
    "network", [5, "roce", {"kind": "ro"}, {"kind": "roce", "per_gpu_gbps": "x"}, {"kind": []}]
)
def test_a_plan_whose_network_is_none_is_refused(model: Path, network: object) -> None:
    plan = ShardingPlan(16, 8, {}, meta={"network": network})
    with pytest.raises(PlanError, match="network is"):
        resolve(model, Machine(), plan)


def test_a_plan_brings_its_network(model: Path) -> None:
    facts = {"kind": "tcpx", "per_gpu_gbps": 50}
    plan = ShardingPlan(16, 8, {}, meta={"network": facts})
    assert resolve(model, Machine(), plan).network == Network("tcpx", 50)
    assert resolve(model, Machine(network="roce"), plan).network == Network("roce")


def test_an_unknown_network_names_the_nearest(model: Path) -> None:
    with pytest.raises(InputError, match=r"'efa-v4'.*did you mean 'efa-v"):
        resolve(model, Machine(gpus=16, network="efa-v4"))
