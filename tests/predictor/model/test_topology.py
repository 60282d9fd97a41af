"""Hosts, NVLink domains and intra groups."""

from __future__ import annotations

import pytest

from predictor.errors import InputError
from predictor.model.topology import Topology
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
