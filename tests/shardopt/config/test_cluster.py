"""Cluster files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.model.topology import NetworkLevel, Topology
from shardopt.config import ClusterConfig, load_cluster
from shardopt.config.cluster import default_nvlink_domain

CLUSTERS = Path(__file__).parents[3] / "configs" / "clusters"
GIB = 1024**3

GOOD = """\
schema: 1
name: two
hosts: 2
ranks_per_host: 2
nvlink_domain: 2
hardware: h100-sxm
hbm_gib: 80
ddr_gib: [64, 64, 32, 32.5]
"""


def test_a_good_file(write: Callable[[str], Path]) -> None:
    assert load_cluster(write(GOOD)) == ClusterConfig(
        "two",
        2,
        2,
        2,
        "h100-sxm",
        (80 * GIB,) * 4,
        (64 * GIB, 64 * GIB, 32 * GIB, round(32.5 * GIB)),
    )


def test_the_kind_of_network_is_priced(write: Callable[[str], Path]) -> None:
    cluster = load_cluster(write(GOOD + "network: {kind: tcpx, per_gpu_gbps: 50}\n"))
    own = load_hardware("h100-sxm")
    network = cluster.joined(own).collectives.inter
    assert network.nic_gbit_s == 50
    assert network.all_to_all.latency_us > own.collectives.inter.all_to_all.latency_us
    assert load_cluster(write(GOOD)).joined(own) is own


def test_defaults(write: Callable[[str], Path]) -> None:
    cluster = load_cluster(write("schema: 1\nhosts: 3\nranks_per_host: 4\nhardware: mine.yaml\n"))
    assert (cluster.name, cluster.world_size, cluster.nvlink_domain) == ("model", 12, 4)
    assert (cluster.hbm_bytes, cluster.ddr_bytes) == (None, None)
    assert cluster.hardware is not None
    assert Path(cluster.hardware).name == "mine.yaml"
    assert Path(cluster.hardware).is_absolute()


@pytest.mark.parametrize("path", sorted(CLUSTERS.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_cluster_is_a_topology(path: Path) -> None:
    cluster = load_cluster(path)
    assert cluster.name == path.stem
    assert cluster.hbm_bytes is not None
    assert cluster.ddr_bytes is not None
    topology = Topology(
        cluster.world_size,
        cluster.ranks_per_host,
        cluster.hbm_bytes,
        cluster.ddr_bytes,
        cluster.nvlink_domain,
    )
    assert topology.hosts == cluster.hosts


def test_a_missing_file_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"did you mean 'dgx_h100_x1"):
        load_cluster(CLUSTERS / "dgx_h100_x.yaml")


LEVELS = """\
schema: 1
hosts: [a, {name: b, in: {leaf: x}}, {name: c, in: {leaf: y}}, {name: d, in: {leaf: x}}]
ranks_per_host: 4
levels:
  - {name: pairs, size: 2, link: nvlink}
  - {name: leaf}
  - {name: spine, oversubscription: 2, latency_us: 1.5}
""".replace("[a,", "[{name: a, in: {leaf: x}},")


def test_levels_of_hosts_as_the_scheduler_gave_them(write: Callable[[str], Path]) -> None:
    cluster = load_cluster(write(LEVELS))
    assert (cluster.hosts, cluster.nvlink_domain) == (4, 2)
    assert cluster.network == (
        NetworkLevel("leaf", 4, 4, 4, 4),
        NetworkLevel("spine", 2, 4, 4, 2, 2.0, None, 1.5),
    )


def test_levels_by_size_over_a_rack_that_spans_hosts(write: Callable[[str], Path]) -> None:
    levels = "[{name: rack, size: 8, link: nvlink}, {name: leaf, size: 2}, {name: spine}]"
    text = f"schema: 1\nhosts: 8\nranks_per_host: 4\nlevels: {levels}\n"
    cluster = load_cluster(write(text))
    assert cluster.nvlink_domain == 8
    assert cluster.network == (
        NetworkLevel("leaf", 4, 8, 8, 4),
        NetworkLevel("spine", 2, 16, 16, 2),
    )


def racks(*hosts: int, levels: str = "[{name: rack, link: nvlink}, {name: spine}]") -> str:
    """A cluster of racks with so many hosts of four ranks each."""
    named = [f"{{name: {r}-{h}, in: {{rack: {r}}}}}" for r, n in enumerate(hosts) for h in range(n)]
    return f"schema: 1\nhosts: [{', '.join(named)}]\nranks_per_host: 4\nlevels: {levels}\n"


@pytest.mark.parametrize(
    ("hosts", "domain", "uneven"),
    [((8, 16), 32, True), ((6, 4, 8), 8, True), ((4, 4), 16, False), ((3, 4), 4, True)],
)
def test_nvlink_joins_the_racks_that_hosts_name(
    write: Callable[[str], Path], hosts: tuple[int, ...], domain: int, uneven: bool
) -> None:
    cluster = load_cluster(write(racks(*hosts)))
    assert cluster.nvlink_domain == domain
    (spine,) = cluster.network
    assert (spine.parts, spine.ranks) == (len(hosts), 4 * min(hosts))
    assert bool(cluster.notes) == uneven
    assert Topology.uniform(cluster.world_size, 4, hbm_bytes=0, ddr_bytes=0, nvlink_domain=domain)


@pytest.mark.parametrize("hosts", [(8, 16), (6, 4, 8), (4, 4), (3, 4), (5,)])
def test_numbers_of_hosts_are_racks_as_if_hosts_named_them(
    write: Callable[[str], Path], hosts: tuple[int, ...]
) -> None:
    named = load_cluster(write(racks(*hosts)))
    head = f"schema: 1\nhosts: {list(hosts)}\nranks_per_host: 4\n"
    levels = "levels: [{name: rack, link: nvlink}, {name: spine}]\n"
    assert load_cluster(write(head + levels)) == named
    assert load_cluster(write(head)).nvlink_domain == named.nvlink_domain
    leaves = load_cluster(write(head + "levels: [{name: leaf}, {name: spine}]\n"))
    assert (leaves.nvlink_domain, leaves.network[1].parts) == (4, len(hosts))


def test_numbers_in_quotes_are_names(write: Callable[[str], Path]) -> None:
    cluster = load_cluster(write('schema: 1\nhosts: ["8", "16"]\nranks_per_host: 4\n'))
    assert (cluster.hosts, cluster.nvlink_domain) == (2, 4)


def test_racks_whose_hosts_alternate_join_whole_stretches(write: Callable[[str], Path]) -> None:
    text = racks(2, 2, 2).replace("rack: 2", "rack: 0")
    cluster = load_cluster(write(text))
    assert (cluster.nvlink_domain, cluster.network[0].parts) == (8, 2)
    assert cluster.notes


@pytest.mark.parametrize(
    ("levels", "domain", "parts"),
    [
        ("[{name: rack, link: nvlink}, {name: spine, size: 2}]", 16, [2]),
        ("[{name: rack, link: nvlink}]", 32, []),
        ("[{name: rack, size: 8, link: nvlink}, {name: pod}, {name: spine, size: 2}]", 8, [4, 2]),
    ],
)
def test_a_size_that_follows_may_be_left_out(
    write: Callable[[str], Path], levels: str, domain: int, parts: list[int]
) -> None:
    cluster = load_cluster(write(f"schema: 1\nhosts: 8\nranks_per_host: 4\nlevels: {levels}\n"))
    assert cluster.nvlink_domain == domain
    assert [level.parts for level in cluster.network] == parts


def test_hosts_with_hardware_of_their_own(write: Callable[[str], Path]) -> None:
    text = "schema: 1\nhosts: [{name: a, hardware: h100-sxm}, b]\nranks_per_host: 8\n"
    cluster = load_cluster(write(text + "hardware: a100-80gb\n"))
    assert cluster.host_hardware == ("h100-sxm", "a100-80gb")


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
    assert default_nvlink_domain(profile, ranks, local) == expected
