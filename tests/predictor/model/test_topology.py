"""Hosts, NVLink domains and intra groups."""

from __future__ import annotations

import pytest

from predictor.errors import InputError
from predictor.model.topology import NetworkLevel, Topology
from tests.builders import a_topology


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
    found = a_topology(world, local, domain)
    assert (found.intra_group_size, found.groups, found.hosts) == (intra, groups, hosts)
    assert [found.group_of(r) for r in (0, world - 1)] == [0, groups - 1]
    assert found.nvlink_domain == (domain or found.local_world_size)


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


def test_one_cap_per_rank() -> None:
    with pytest.raises(InputError, match="1 hbm caps for 2 ranks"):
        Topology(2, 2, (1,), (1, 1))


def test_equal_parts_in_order() -> None:
    level = NetworkLevel.of("pod", [0, 0, 1, 1], 8)
    assert (level.parts, level.ranks, level.ring_ranks, level.crossings) == (2, 16, 16, 2)


def test_the_smallest_part_has_the_fullest_links() -> None:
    level = NetworkLevel.of("pod", ["a", "a", "a", "b"], 8)
    assert (level.parts, level.ranks, level.ring_ranks) == (2, 8, 8)


def test_a_ring_leaves_a_part_each_time_that_the_order_of_hosts_does() -> None:
    level = NetworkLevel.of("pod", ["a", "b", "a", "b"], 8)
    assert (level.ranks, level.ring_ranks, level.crossings) == (16, 8, 4)


def test_a_ring_closes() -> None:
    level = NetworkLevel.of("pod", ["a", "b", "b", "a"], 8)
    assert (level.ring_ranks, level.crossings) == (16, 2)


def test_one_part_is_never_left() -> None:
    level = NetworkLevel.of("pod", ["a", "a"], 8)
    assert (level.parts, level.ranks, level.crossings) == (1, 16, 0)


@pytest.mark.parametrize(
    ("over", "gbit_s", "rate"),
    [(1.0, None, 400.0), (4.0, None, 100.0), (1.0, 25.0, 25.0), (1.0, 800.0, 400.0)],
)
def test_the_rate_of_a_ranks_share(over: float, gbit_s: float | None, rate: float) -> None:
    level = NetworkLevel.of("pod", [0, 1], 8, oversubscription=over, gbit_s=gbit_s)
    assert level.rate(400.0) == rate


@pytest.mark.parametrize(
    ("level", "words"),
    [
        (NetworkLevel("pod", 2, 16, 16, 2), "2 parts of at least 16 ranks"),
        (NetworkLevel("pod", 2, 8, 8, 2, oversubscription=0.0), "oversubscription is 0"),
        (NetworkLevel("pod", 2, 8, 8, 2, gbit_s=-1.0), "gbit_s is -1"),
    ],
)
def test_levels_that_no_ranks_make_up(level: NetworkLevel, words: str) -> None:
    with pytest.raises(InputError, match=words):
        Topology(16, 8, (1,) * 16, (1,) * 16, network=(level,))
