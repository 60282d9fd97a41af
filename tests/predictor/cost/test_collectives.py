"""Shape of the collective curves over sizes, ranks and wirings."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from predictor.cost.collectives import (
    OPS,
    Collectives,
    Level,
    Uplink,
    all_to_all,
    bands,
    hierarchical,
    ring_or_tree,
)
from predictor.errors import InputError
from predictor.hardware.loader import list_hardware, load_hardware
from predictor.hardware.schema import Curve
from predictor.model.topology import NetworkLevel, Topology
from predictor.units import MIB, us
from tests.builders import a_topology


def collectives(name: str, world: int, local: int | None = None, domain: int = 0) -> Collectives:
    return Collectives(load_hardware(name), a_topology(world, local, domain))


@st.composite
def any_topology(draw: st.DrawFn) -> Topology:
    """1 to 512 ranks on hosts of any size; NVLink among part of a host, a host, or whole hosts."""
    local = draw(st.integers(1, 16))
    hosts = draw(st.integers(1, 512 // local))
    spans = draw(st.sampled_from([n for n in range(1, hosts + 1) if hosts % n == 0]))
    part = draw(st.sampled_from([n for n in range(1, local + 1) if local % n == 0]))
    domain = part if spans == 1 else local * spans
    return a_topology(local * hosts, local, domain)


@given(
    st.sampled_from(list_hardware()),
    st.sampled_from(OPS),
    any_topology(),
    st.sampled_from(["world", "intra", "cross"]),
)
@example("h100-sxm", "all_to_all", a_topology(1), "world")
@example("cpu-gloo", "all_reduce", a_topology(1), "intra")
@example("a100-80gb", "reduce_scatter", a_topology(8), "cross")
@settings(max_examples=200, deadline=None)
def test_any_ranks_and_any_wiring_have_a_time_unless_nobody_meets(
    name: str, op: str, top: Topology, scope: str
) -> None:
    engine = Collectives(load_hardware(name), top)
    sizes = np.concatenate(([0.0], np.geomspace(1, 1e13, 40)))
    times = getattr(engine, op)(sizes, scope)
    assert np.isfinite(times).all()
    assert (times >= 0).all()
    assert (np.diff(times) >= -1e-9 * times[1:]).all()
    assert (times.max() > 0) == (engine.ranks(scope) > 1)


@pytest.mark.parametrize("op", OPS)
def test_hosts_of_a_rack_are_joined_by_its_nvlink(op: str) -> None:
    """GB200: hosts of four in one domain of 72 cost no NIC; a second rack does."""
    size = 2.0**28
    rack, racks = collectives("gb200", 72, 4, 72), collectives("gb200", 144, 4, 72)
    assert rack.ranks("intra") == 72
    assert getattr(rack, op)(size, "cross") == 0.0
    assert getattr(racks, op)(size, "world") > getattr(rack, op)(size, "world")
    assert getattr(racks, op)(size, "intra") == getattr(rack, op)(size, "world")


def test_scopes_take_their_ranks() -> None:
    engine = collectives("a100-80gb", 32)
    assert [engine.ranks(s) for s in ("world", "intra", "cross")] == [32, 8, 4]
    with pytest.raises(InputError, match="scope"):
        engine.all_to_all(1.0, "galaxy")


GPUS = [name for name in list_hardware() if not load_hardware(name).inline]
HOUR = 3.6e6


def flat(us_per_mib: float, latency_us: float = 0.0, per_rank_us: float = 0.0) -> Curve:
    return Curve(
        latency_us=latency_us,
        latency_per_rank_us=per_rank_us,
        edge_mib=(0.0,),
        us_per_mib=(us_per_mib,),
    )


def hosts(
    count: int, local: int, nvlink: float, nic: float, tree_cost: float = 1.0, sharp: bool = False
) -> list[Level]:
    return [
        Level("intra", flat(nvlink), 1, local),
        Level("inter", flat(nic), local, local * count, "nic", tree_cost, sharp),
    ]


def mib_of(time_ms: float, us_per_mib: float) -> float:
    return time_ms / us(1.0) / us_per_mib


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter"])
def test_a_ring_passes_the_bytes_of_all_ranks_over_the_nics_of_a_host(op: str) -> None:
    """2 hosts of 8: 15/16 of the buffer leaves each host over 8 NICs, not one half of it."""
    levels = hosts(2, 8, 0.001, 1.0)
    time = float(ring_or_tree(op, np.array(64 * MIB), levels))  # type: ignore[arg-type]
    assert mib_of(time, 1.0) == pytest.approx(64 * 15 / 16 / 8)


@pytest.mark.parametrize(
    ("count", "sharp", "spread"), [(2, False, 1), (4, False, 31 / 16), (4, True, 1)]
)
def test_an_all_reduce_takes_the_tree_or_the_ring(count: int, sharp: bool, spread: float) -> None:
    """A tree sends the buffer once over two hosts or through switches that add up, twice over more,
    where the ring of 32 ranks is as good: 2 * 31/32."""
    levels, size = hosts(count, 8, 0.001, 1.0, sharp=sharp), np.array(64 * MIB)
    rings = ring_or_tree("reduce_scatter", size, levels) + ring_or_tree("all_gather", size, levels)
    time = float(ring_or_tree("all_reduce", size, levels, rings))
    assert mib_of(time, 1.0) == pytest.approx(64 * spread / 8)


def test_a_tree_slows_the_reduction_within() -> None:
    size = np.array(64 * MIB)
    plain, slowed = (
        float(ring_or_tree("all_reduce", size, hosts(2, 8, 1.0, 0.001, tree_cost=c)))
        for c in (1.0, 1.05)
    )
    assert mib_of(plain, 1.0) == pytest.approx(64 * 14 / 8)
    assert slowed == pytest.approx(1.05 * plain)


def test_a_ring_hops_over_every_rank() -> None:
    """16 ranks on 2 hosts: 7 hops in the first host, one between, 7 in the second."""
    levels = [
        Level("intra", flat(1.0, per_rank_us=2.0), 1, 8),
        Level("inter", flat(1.0, per_rank_us=9.0), 8, 16, "nic"),
    ]
    empty = float(ring_or_tree("all_gather", np.array(0.0), levels))
    assert empty == pytest.approx(us(7 * 2.0 + 9.0 + 7 * 2.0))


def test_the_switch_reduces_where_it_is_faster() -> None:
    slow = Curve(latency_us=100.0, edge_mib=(0.0,), us_per_mib=(0.5,), own_part=1.0)
    levels = [Level("intra", flat(1.0), 1, 8, switch=slow)]
    sizes = np.array([1.0, 1024.0]) * MIB
    ring, switched = ring_or_tree("all_reduce", sizes, levels)
    assert ring == pytest.approx(us(1.75))
    assert switched == pytest.approx(us(100 + 1024))
    gathered = ring_or_tree("all_gather", sizes, levels)
    assert gathered == pytest.approx(us(0.875 * np.array([1.0, 1024.0])))


def racks(count: int, message_us: float) -> list[Level]:
    """Domains of 72 ranks whose switch adds up at 1 us a MiB, on NICs that are no limit."""
    switch = Curve(latency_us=0.0, edge_mib=(0.0,), us_per_mib=(0.5,), own_part=0.0)
    return [
        Level("intra", flat(10.0), 1, 72, switch=switch),
        Level("inter", flat(0.01), 72, 72 * count, "nic", message_us=message_us),
    ]


@pytest.mark.parametrize(("count", "messages"), [(2, 4), (3, 8), (4, 16), (20, 16)])
def test_messages_past_32_heads_bound_an_all_reduce_over_racks(count: int, messages: int) -> None:
    """A MiB for each head: eight messages of 128 KiB or 16 of 64 KiB, sent and received, twice
    over more than two racks."""
    size = np.array(32 * MIB)
    free = float(ring_or_tree("all_reduce", size, racks(count, 0.0)))
    assert mib_of(free, 1.0) == pytest.approx(32 * 71 / 72)
    bound = float(ring_or_tree("all_reduce", size, racks(count, 10.0)))
    assert bound == pytest.approx(us(10.0 * 4 * messages))


def test_an_all_to_all_counts_the_messages_of_a_nic() -> None:
    levels = racks(2, 2.0)
    time = float(all_to_all(np.array(144 * MIB), levels))
    assert time == pytest.approx(us(2 * 72 * 8 * 2.0))


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("op", OPS)
def test_more_hosts_take_no_less_time(name: str, op: str) -> None:
    hardware = load_hardware(name)
    shared = getattr(hardware.collectives.intra, op).rank_cost
    if shared and shared[8] > shared[2]:
        pytest.skip("on a second host less goes through the links that cards of a host share")
    local = max(hardware.gpus_per_host, hardware.nvlink_domain)
    sizes = np.geomspace(1, 1e11, 40)
    before = np.zeros_like(sizes)
    for count in (1, 2, 4, 16, 64):
        times = getattr(Collectives(hardware, a_topology(local * count, local)), op)(sizes, "world")
        assert (times >= before * (1 - 1e-3)).all(), count
        assert times.max() < HOUR
        before = times


@pytest.mark.parametrize("name", GPUS)
@given(st.integers(2, 72), st.sampled_from(OPS))
@settings(max_examples=25)  # of every profile
def test_ranks_between_the_measured_ones_lie_between_them(name: str, ranks: int, op: str) -> None:
    """Bus bandwidth of a large message neither collapses nor explodes at odd rank counts."""
    hardware = load_hardware(name)
    most = hardware.nvlink_domain
    ranks = 2 + (ranks - 2) % (most - 1) if most > 1 else 2
    size = 2.0**32
    few, here, many = (
        float(getattr(Collectives(hardware, a_topology(n, n)), op)(size)) for n in (2, ranks, most)
    )
    if not hardware.collectives.intra.all_reduce.rank_cost:  # a cube mesh jumps
        assert 0.9 * min(few, many) <= here <= 1.25 * max(few, many)


def pods(nic: float, uplink: float, latency_us: float = 0.0) -> list[Level]:
    """Two pods of two hosts of 8, whose ranks share their pod's links to the other one."""
    up = Uplink(flat(uplink), 16, 16, 2, 2, latency_us)
    return [
        Level("intra", flat(0.001), 1, 8),
        Level("inter", flat(nic), 8, 32, "nic", uplinks=(up,)),
    ]


@pytest.mark.parametrize(("over", "bound"), [(1.0, 24 / 32), (1.2, 24 / 32), (4.0, 4 * 16 / 32)])
def test_the_fullest_link_decides_an_all_to_all(over: float, bound: float) -> None:
    """24 of 32 parts of a buffer leave a host, 16 leave a pod."""
    time = float(all_to_all(np.array(64 * MIB), pods(1.0, over)))
    assert mib_of(time, 1.0) == pytest.approx(64 * bound)


def test_a_ring_leaves_a_pod_once() -> None:
    size = np.array(64 * MIB)
    free, full = (float(ring_or_tree("all_gather", size, pods(1.0, over))) for over in (1.9, 4.0))
    assert mib_of(free, 1.0) == pytest.approx(64 * 31 / 32 / 8)
    assert full == pytest.approx(2 * free)


def test_crossings_wait() -> None:
    empty = np.array(0.0)
    levels = pods(1.0, 1.0, latency_us=5.0)
    assert float(all_to_all(empty, levels)) == pytest.approx(us(5.0))
    assert float(ring_or_tree("all_gather", empty, levels)) == pytest.approx(us(5.0))
    assert float(ring_or_tree("all_reduce", empty, levels)) == pytest.approx(us(10.0))
    assert float(hierarchical("all_gather", empty, levels)) == pytest.approx(us(10.0))


@given(
    st.sampled_from([*GPUS, "cpu-gloo"]),
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from(OPS),
    st.sampled_from(["world", "cross"]),
    st.floats(1, 8),
)
def test_levels_that_take_nothing_away_change_nothing_and_others_only_cost(
    name: str, inner: int, outer: int, op: str, scope: str, over: float
) -> None:
    hardware, hosts = load_hardware(name), inner * outer
    plain = a_topology(8 * hosts)
    places = [list(range(hosts)), [host // inner for host in range(hosts)]]
    sizes = np.geomspace(1, 1e11, 20)

    def times(cost: float, latency_us: float) -> np.ndarray:
        levels = tuple(
            NetworkLevel.of("x", p, 8, oversubscription=cost, latency_us=latency_us) for p in places
        )
        topology = Topology(8 * hosts, 8, plain.hbm_cap_bytes, plain.ddr_cap_bytes, network=levels)
        times_ms: np.ndarray = getattr(Collectives(hardware, topology), op)(sizes, scope)
        return times_ms

    expected = getattr(Collectives(hardware, plain), op)(sizes, scope)
    np.testing.assert_allclose(times(1.0, 0.0), expected, rtol=1e-12)
    assert (times(over, 3.0) >= expected * (1 - 1e-12)).all()


@given(st.lists(st.floats(1, 1e9), min_size=1, max_size=6, unique=True), st.floats(0, 1e12))
def test_bands_share_out_every_byte(edges: list[float], size: float) -> None:
    parts = bands(np.array([size]), [0.0, *sorted(edges)])
    assert parts.min() >= -1e-6 * size
    assert parts.sum() == pytest.approx(size, rel=1e-9)
