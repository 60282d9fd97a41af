"""Hosts, NVLink domains and intra groups, and groups as `DMPCollection` forms them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from predictor.errors import InputError
from predictor.model.topology import NetworkLevel, ReplicaGroups, Topology
from tests.builders import a_topology
from tests.search.problems import a_table, a_workload


@pytest.mark.parametrize(
    ("world", "local", "domain", "intra", "groups", "hosts"),
    [
        (1, None, 0, 1, 1, 1),
        (8, None, 0, 8, 1, 1),
        (16, None, 0, 8, 2, 2),
        (16, 4, 16, 16, 1, 4),
        (8, 8, 2, 8, 1, 1),
        (72, 4, 36, 36, 2, 18),
    ],
)
def test_an_intra_group_is_the_larger_of_host_and_domain(
    world: int, local: int | None, domain: int, intra: int, groups: int, hosts: int
) -> None:
    topology = a_topology(world, local, domain)
    assert (topology.intra_group_size, topology.groups, topology.hosts) == (intra, groups, hosts)
    assert [topology.group_of(r) for r in (0, world - 1)] == [0, groups - 1]
    assert topology.nvlink_domain == (domain or topology.local_world_size)


@pytest.mark.parametrize(
    ("world", "local", "domain", "message"),
    [
        (0, None, 0, "world size is 0"),
        (9, 8, 0, "9 GPUs do not fill hosts of 8"),
        (8, 8, 3, "an NVLink domain of 3 ranks"),
        (24, 8, 16, "an NVLink domain of 16 ranks"),
        (8, 4, -4, "an NVLink domain of -4 ranks"),
    ],
)
def test_what_does_not_divide_is_refused(
    world: int, local: int | None, domain: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        a_topology(world, local, domain)


def test_a_ring_leaves_a_part_each_time_that_the_order_of_hosts_does() -> None:
    level = NetworkLevel.of("pod", ["a", "b", "a", "b"], 8)
    assert (level.ranks, level.ring_ranks, level.crossings) == (16, 8, 4)


@pytest.mark.parametrize(
    ("over", "gbit_s", "rate"),
    [(1.0, None, 400.0), (4.0, None, 100.0), (1.0, 25.0, 25.0), (1.0, 800.0, 400.0)],
)
def test_the_rate_of_a_ranks_share(over: float, gbit_s: float | None, rate: float) -> None:
    level = NetworkLevel.of("pod", [0, 1], 8, oversubscription=over, gbit_s=gbit_s)
    assert level.rate(400.0) == rate


def job(ranks: int, local: int, domain: int = 0) -> Topology:
    return Topology.uniform(ranks, local, hbm_bytes=10, ddr_bytes=20, nvlink_domain=domain)


def peers(groups: ReplicaGroups, world: int) -> list[list[int]]:
    """`DMPCollection._create_process_groups`: a row is a sharding group, a column a replica
    group."""
    size, step = groups.size, world // groups.size
    if groups.use_inter_host_allreduce:
        return [list(range(i, i + size)) for i in range(0, world, size)]
    return [[step * r + group for r in range(size)] for group in range(step)]


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize(("world", "local", "size"), [(16, 8, 8), (16, 8, 4), (32, 4, 2)])
def test_as_many_ranks_share_a_host_as_in_torchrecs_groups(
    world: int, local: int, size: int, contiguous: bool
) -> None:
    groups = ReplicaGroups(size, use_inter_host_allreduce=contiguous)
    matrix = peers(groups, world)
    copies = [list(column) for column in zip(*matrix, strict=True)]
    for on_host, members in (
        (groups.sharding_group(job(world, local)), matrix),
        (groups.replica_group(job(world, local)), copies),
    ):
        for ranks in members:
            assert len(ranks) == on_host.world_size
            hosts = [rank // local for rank in ranks]
            assert hosts == sorted(hosts)
            assert {hosts.count(host) for host in hosts} == {on_host.local_world_size}


@pytest.mark.parametrize(
    ("world", "domain", "size", "pod"),
    [(96, 32, 48, 16), (144, 72, 36, 36), (144, 72, 72, 72), (288, 72, 144, 72), (120, 24, 40, 8)],
)
def test_domains_that_end_within_a_group_are_parted(
    world: int, domain: int, size: int, pod: int
) -> None:
    """Ranks of a pod are joined by NVLink in every group, and no larger pods fit."""
    groups = ReplicaGroups(size, use_inter_host_allreduce=True)
    assert groups.sharding_group(job(world, 4, domain)).intra_group_size == pod
    for members in peers(groups, world):
        pods = [members[i : i + pod] for i in range(0, size, pod)]
        assert all(len({rank // domain for rank in ranks}) == 1 for ranks in pods)


def test_a_rank_has_the_least_memory_of_its_copies() -> None:
    topology = replace(job(4, 4), hbm_cap_bytes=(4, 3, 2, 1))
    assert ReplicaGroups(2).sharding_group(topology).hbm_cap_bytes == (3, 1)
    row = ReplicaGroups(2, use_inter_host_allreduce=True).sharding_group(topology)
    assert row.hbm_cap_bytes == (2, 1)
    assert row.job is topology


def test_groups_that_do_not_divide_the_world() -> None:
    message = "size is 3, which does not divide 16 ranks; allowed are 1, 2, 4, 8, 16"
    with pytest.raises(InputError, match=message):
        ReplicaGroups(3).sharding_group(job(16, 8))


def test_levels_of_the_network_are_seen_by_groups_that_span_them() -> None:
    pods = NetworkLevel.of("pod", ["a", "a", "b", "b"], 8, oversubscription=2)
    topology = replace(job(32, 8), network=(pods,))
    spread = ReplicaGroups(8).sharding_group(topology).network
    assert [(v.parts, v.ranks, v.ring_ranks, v.crossings) for v in spread] == [(2, 4, 4, 2)]
    assert ReplicaGroups(8).replica_group(topology).network == (), "4 ranks of a host"
    row = ReplicaGroups(16, use_inter_host_allreduce=True)
    assert row.sharding_group(topology).network == ()
    assert [v.ranks for v in row.replica_group(topology).network] == [1]
    uneven = NetworkLevel.of("pod", ["a", "a", "a", "b"], 8)
    with pytest.raises(InputError, match="lie unevenly on the parts of level 'pod'"):
        row.sharding_group(replace(topology, network=(uneven,)))


def test_copies_on_neighbours_cross_no_uneven_racks() -> None:
    """Racks of 8 and 16 hosts of 4 ranks in two groups, as in TorchRec's pull request 4768."""
    racks = NetworkLevel.of("network", [0] * 8 + [1] * 16, 4)
    topology = replace(job(96, 4, 32), network=(racks,))
    groups = ReplicaGroups(48)
    assert groups.replica_group(topology).network == ()
    (spread,) = groups.sharding_group(topology).network
    assert (spread.parts, spread.ranks) == (2, 16)


def test_facts_are_read_back() -> None:
    groups = ReplicaGroups(4, 10, use_inter_host_allreduce=True)
    read = ReplicaGroups.from_facts(groups.facts(job(16, 8)), "plan.json")
    assert read == (groups, 16, 8)
    for broken in (None, [], {"size": 4}, {**groups.facts(job(16, 8)), "size": 0}):
        with pytest.raises(InputError, match=r"plan\.json: replica_groups"):
            ReplicaGroups.from_facts(broken, "plan.json")


def test_optimizers_that_torchrec_cannot_average() -> None:
    table = a_table("t", optimizer="adam")
    workload = replace(a_workload(table), replica_groups=ReplicaGroups(2))
    with pytest.raises(InputError, match="table 't' has the optimizer adam"):
        workload.sharding_group(job(4, 4))
    assert workload.sharding_group(job(2, 2)).job is None, "one copy needs no averaging"


def test_groups_that_lie_unevenly_on_hosts() -> None:
    with pytest.raises(InputError, match="lie unevenly on hosts of 8"):
        ReplicaGroups(8).sharding_group(job(24, 8))
