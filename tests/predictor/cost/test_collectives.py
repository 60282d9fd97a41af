"""Shape of the collective curves over sizes, ranks and wirings."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.cost.collectives import OPS, Collectives
from predictor.errors import InputError
from predictor.hardware.loader import list_hardware, load_hardware
from predictor.model.topology import Topology
from predictor.units import gb_per_s


def topology(world: int, local: int = 8, domain: int = 0) -> Topology:
    return Topology.uniform(
        world, min(world, local), hbm_bytes=1, ddr_bytes=1, nvlink_domain=domain
    )


def collectives(name: str, world: int, local: int = 8, domain: int = 0) -> Collectives:
    return Collectives(load_hardware(name), topology(world, local, domain))


@pytest.mark.parametrize("name", list_hardware())
@pytest.mark.parametrize("op", OPS)
def test_one_rank_is_free_and_scopes_without_peers_too(name: str, op: str) -> None:
    alone = collectives(name, 1)
    for scope in ("world", "intra", "cross"):
        assert getattr(alone, op)(1e6, scope) == 0.0
    assert getattr(collectives(name, 8), op)(1e6, "cross") == 0.0


@given(
    st.sampled_from(list_hardware()),
    st.sampled_from(OPS),
    st.sampled_from([(2, 8, 0), (8, 8, 0), (8, 8, 2), (16, 8, 0), (128, 8, 0), (32, 4, 16)]),
    st.sampled_from(["world", "intra", "cross"]),
    st.floats(0, 1e11),
    st.floats(1, 4),
)
@settings(max_examples=150, deadline=None)
def test_time_never_falls_with_size(
    name: str, op: str, shape: tuple[int, int, int], scope: str, size: float, factor: float
) -> None:
    engine = collectives(name, *shape)
    less, more = getattr(engine, op)(np.array([size, size * factor]), scope)
    assert np.isfinite(more)
    assert getattr(engine, op)(0.0, scope) <= less * (1 + 1e-12) <= more * (1 + 1e-9)


@st.composite
def any_topology(draw: st.DrawFn) -> Topology:
    """1 to 512 ranks on hosts of any size; NVLink among part of a host, a host, or whole hosts."""
    local = draw(st.integers(1, 16))
    hosts = draw(st.integers(1, 512 // local))
    spans = draw(st.sampled_from([n for n in range(1, hosts + 1) if hosts % n == 0]))
    part = draw(st.sampled_from([n for n in range(1, local + 1) if local % n == 0]))
    domain = part if spans == 1 else local * spans
    return Topology.uniform(local * hosts, local, hbm_bytes=1, ddr_bytes=1, nvlink_domain=domain)


@given(
    st.sampled_from(list_hardware()),
    st.sampled_from(OPS),
    any_topology(),
    st.sampled_from(["world", "intra", "cross"]),
)
@settings(max_examples=200, deadline=None)
def test_any_ranks_and_any_wiring_have_a_time(
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


def test_shape_is_kept_and_scalars_work() -> None:
    engine = collectives("h100-sxm", 8)
    sizes = np.geomspace(1, 1e9, 12).reshape(3, 4)
    times = engine.all_to_all(sizes, "world")
    assert times.shape == (3, 4)
    assert float(engine.all_to_all(float(sizes[1, 2]), "world")) == times[1, 2]
    assert engine.all_to_all(np.float64(0.0), "world").shape == ()
    assert float(engine.all_to_all(0.0)) == engine.floor_ms("all_to_all")


def test_beyond_the_table_the_last_bandwidth_holds() -> None:
    engine = collectives("a100-40gb", 8)
    t = engine.all_to_all(np.array([2.0**38, 2.0**39, 2.0**40]), "world")
    assert t[2] - t[1] == pytest.approx(2 * (t[1] - t[0]), rel=1e-3)


def test_two_hosts_are_bound_by_the_nic() -> None:
    hw = load_hardware("h100-sxm")
    one, two = collectives("h100-sxm", 8), collectives("h100-sxm", 16)
    size = 2.0**30
    over_nic = size / 2 / gb_per_s(hw.collectives.inter.nic_gbit_s / 8)
    assert two.all_to_all(size, "world") > over_nic > one.all_to_all(size, "world")
    assert two.all_reduce(size, "world") < 2 * one.all_reduce(size, "world")


def test_a_larger_nvlink_domain_is_faster_and_a_smaller_one_slower() -> None:
    size = 2.0**26
    hosts = collectives("b200", 16, 8)
    rack = collectives("b200", 16, 8, 16)
    pairs = collectives("b200", 8, 8, 2)
    whole = collectives("b200", 8, 8)
    assert rack.all_to_all(size, "world") < 0.5 * hosts.all_to_all(size, "world")
    for op in OPS:
        # one ring over 16 moves 15/16 of the bytes, two levels over 8 and 2 at most 7/8 each
        assert getattr(rack, op)(size, "world") < 1.08 * getattr(hosts, op)(size, "world")
        assert getattr(pairs, op)(size, "world") > getattr(whole, op)(size, "world")


def test_scopes_take_their_ranks() -> None:
    engine = collectives("a100-80gb", 32)
    assert [engine.ranks(s) for s in ("world", "intra", "cross")] == [32, 8, 4]
    with pytest.raises(InputError, match="scope"):
        engine.all_to_all(1.0, "galaxy")


def test_many_plans_at_once_are_cheap() -> None:
    engine = collectives("h100-sxm", 8)
    sizes = np.random.default_rng(0).uniform(1e3, 1e9, (2000, 128))
    engine.all_to_all(sizes, "world")
    start = time.perf_counter()
    engine.all_to_all(sizes, "world")
    assert time.perf_counter() - start < 1.0
