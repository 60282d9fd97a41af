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
    found = cluster.joined(own).collectives.inter
    assert found.nic_gbit_s == 50
    assert found.all_to_all.latency_us > own.collectives.inter.all_to_all.latency_us
    assert load_cluster(write(GOOD)).joined(own) is own


@pytest.mark.parametrize("given", ["{kind: token-ring}", "{per_gpu_gbps: 4}", "roce"])
def test_a_network_that_is_none_is_refused(write: Callable[[str], Path], given: str) -> None:
    with pytest.raises(InputError, match="network"):
        load_cluster(write(GOOD + f"network: {given}\n"))


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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (racks(2, 2, levels="[{name: rack, size: 8, link: nvlink}, {name: spine}]"), "a size too"),
        (racks(2, 2).replace("1-1, in: {rack: 1}", "1-1"), "'1-1' says none"),
        (racks(2, 2) + "nvlink_domain: 4\n", "got 4, but level 'rack' has 8"),
    ],
)
def test_racks_that_contradict_themselves(
    write: Callable[[str], Path], text: str, words: str
) -> None:
    with pytest.raises(InputError) as caught:
        load_cluster(write(text))
    assert words in str(caught.value)


def test_hosts_with_hardware_of_their_own(write: Callable[[str], Path]) -> None:
    text = "schema: 1\nhosts: [{name: a, hardware: h100-sxm}, b]\nranks_per_host: 8\n"
    cluster = load_cluster(write(text + "hardware: a100-80gb\n"))
    assert cluster.host_hardware == ("h100-sxm", "a100-80gb")


BAD_FILES = [
    ("hosts: 2", "hosts: 0", [":3: hosts: got 0", "at least 1"]),
    ("hosts: 2\n", "", [":1: hosts: missing"]),
    ("hosts:", "host:", [":3: host: unknown key", "did you mean 'hosts'?"]),
    ("hosts: 2", "hosts: true", [":3: hosts: got True"]),
    ("hosts: 2", "hosts: [8, 0]", [":3: hosts: got [8, 0]", "each rack"]),
    ("hosts: 2", "hosts: [8, a]", [":3: hosts: got [8, 'a']", "each rack"]),
    ("hosts: 2", "hosts: [8, 1.5]", [":3: hosts: got [8, 1.5]", "each rack"]),
    ("hosts: 2", "hosts: [8, 1000000000000]", [":3: hosts: got", "65536"]),
    ("nvlink_domain: 2", "nvlink_domain: [8, 16]", [":5: nvlink_domain: got [8, 16]", "hosts: [8"]),
    ("nvlink_domain: 2", "nvlink_domain: 3", [":5: nvlink_domain: got 3", "must divide"]),
    ("hbm_gib: 80", "hbm_gib: -1", [":7: hbm_gib: got -1", "GiB per rank"]),
    ("hbm_gib: 80", "hbm_gib: lots", [":7: hbm_gib: got 'lots'"]),
    ("32, 32.5]", "32]", [":8: ddr_gib: got 3 numbers for 4 ranks"]),
    ("32, 32.5]", "32, no]", [":8: ddr_gib[3]: got False"]),
    ("ranks_per_host: 2", "ranks_per_host: 65537", [":4: ranks_per_host: got 65537", "65536"]),
    ("ranks_per_host: 2", "ranks_per_host: 65536", [":3: hosts: hosts x ranks_per_host"]),
    (GOOD, "[]", ["model.yaml:1: got []", "schema: 1"]),
    (GOOD, "", ["the file is empty"]),
]
BAD_LEVELS = [
    ("{name: leaf}", "{name: leaf, size: 2}", [":6: levels[1]", "size"]),
    ("in: {leaf: y}", "in: {pod: y}", [":2: hosts[2].in", "'pod' is unknown", "leaf, spine"]),
    (", in: {leaf: y}", "", ["levels[1]", "host 'c' says none"]),
    ("name: c", "name: b", [":2: hosts[2]: host 'b' appears twice"]),
    ("name: c, in: {leaf: y}", "name: c, in: y", ["hosts[2].in: got 'y'", "{rail: a}"]),
    ("name: spine", "name: leaf", [":4: levels", "leaf"]),
    ("{name: spine", "{name: spine, size: 3", [":7: levels[2].size: got 3", "2 parts"]),
    ("size: 2, link: nvlink", "size: [2, 4], link: nvlink", [":5: levels[0].size: got [2, 4]"]),
    ("size: 2, link: nvlink", "link: nvlink", [":5: levels[0]: size is missing"]),
    ("size: 2, link: nvlink", "size: 3, link: nvlink", ["levels[0].size: got 3", "divide"]),
    ("{name: leaf}", "{name: leaf, size: 2, link: nvlink}", ["only the innermost"]),
    ("oversubscription: 2", "oversubscription: 0.5", ["oversubscription: got 0.5", "least 1"]),
    ("oversubscription: 2", "oversubscription: 2, gbit_s: 10", ["gbit_s"]),
    ("ranks_per_host: 4", "ranks_per_host: 4\nnvlink_domain: 4", ["got 4", "'pairs' has 2"]),
    ("name: a,", "name: a, hardware: h100-sxm,", ["hosts[1]", "name this one's"]),
]


@pytest.mark.parametrize(
    ("text", "old", "new", "parts"),
    [*((GOOD, *case) for case in BAD_FILES), *((LEVELS, *case) for case in BAD_LEVELS)],
)
def test_bad_files(
    write: Callable[[str], Path], text: str, old: str, new: str, parts: list[str]
) -> None:
    assert old in text
    with pytest.raises(InputError) as caught:
        load_cluster(write(text.replace(old, new, 1)))
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("sizes", [(3, 2), (2, 3), (2, 1)])
def test_levels_that_do_not_multiply(write: Callable[[str], Path], sizes: tuple[int, int]) -> None:
    first, second = sizes
    levels = f"[{{name: leaf, size: {first}}}, {{name: spine, size: {second}}}]"
    text = f"schema: 1\nhosts: 4\nranks_per_host: 8\nlevels: {levels}\n"
    with pytest.raises(InputError, match=r"levels\[\d\]\.size: got \d"):
        load_cluster(write(text))


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
