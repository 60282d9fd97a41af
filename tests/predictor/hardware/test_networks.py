"""Networks between hosts by kind, and what they change of a profile."""

from __future__ import annotations

import pytest

from predictor.cost.collectives import Collectives, bus_factor
from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.hardware.networks import Network, list_networks
from predictor.hardware.schema import HardwareProfile
from predictor.model.topology import Topology

HOSTS = Topology.uniform(16, 8, hbm_bytes=0, ddr_bytes=0)


def exchange_ms(hardware: HardwareProfile, size: float) -> float:
    return float(Collectives(hardware, HOSTS).all_to_all(size))


@pytest.mark.parametrize("kind", list_networks())
def test_a_network_changes_what_is_between_hosts_alone(kind: str) -> None:
    hardware = load_hardware("b200")
    joined = Network(kind).joins(hardware)
    assert joined.collectives.intra == hardware.collectives.intra
    assert (
        joined.collectives.inter.provenance.source != hardware.collectives.inter.provenance.source
    )
    slower = Network(kind, joined.collectives.inter.nic_gbit_s / 2).joins(hardware)
    assert 1.2 < exchange_ms(slower, 2**30) / exchange_ms(joined, 2**30) < 2.2
    assert joined.name == hardware.name


def test_unlike_networks_take_unlike_times() -> None:
    hardware = load_hardware("h100-sxm")
    times = [
        exchange_ms(Network(kind).joins(hardware), 2**22) for kind in ("roce", "tcpxo", "tcpx")
    ]
    assert times == sorted(times)
    assert times[2] > 5 * times[0]


def test_cpu_ranks_have_their_own_links() -> None:
    with pytest.raises(InputError, match=r"roce.*cpu-gloo"):
        Network("roce").joins(load_hardware("cpu-gloo"))


@pytest.mark.parametrize("name", ["mi300x", "mi355x"])
def test_ranks_on_infinity_fabric_have_a_link_for_each_other_rank(name: str) -> None:
    """Two ranks share one link of seven, so a bus byte takes them some seven times as long."""
    hardware = load_hardware(name)
    times = {}
    for ranks in (2, 4, 8):
        topology = Topology.uniform(ranks, ranks, hbm_bytes=0, ddr_bytes=0)
        time = float(Collectives(hardware, topology).all_to_all(2.0**32))
        times[ranks] = time * ranks / (ranks - 1)
    assert 5 < times[2] / times[8] <= 7
    assert 1.8 < times[4] / times[8] <= 7 / 3
    assert hardware.groups["embedding"].provenance.kind == "not validated"


@pytest.mark.parametrize("kind", ["ib-ndr", "efa-v2"])
def test_an_empty_all_to_all_takes_longer_with_every_peer(kind: str) -> None:
    hardware = Network(kind).joins(load_hardware("h100-sxm"))
    hosts = [Topology.uniform(8 * n, 8, hbm_bytes=0, ddr_bytes=0) for n in (2, 4, 8, 16)]
    times = [Collectives(hardware, ranks).floor_ms("all_to_all") for ranks in hosts]
    for near, far, fewer, more in zip(times, times[1:], hosts, hosts[1:], strict=False):
        peers = more.world_size - fewer.world_size
        per_peer = hardware.collectives.inter.all_to_all.latency_per_rank_us
        assert far - near == pytest.approx(peers * per_peer / 1000)


def test_the_first_chunk_to_a_peer_is_not_pipelined() -> None:
    """An all-to-all of up to 128 KiB to each of 16 ranks pays for its chunk; larger ones once."""
    hardware = Network("efa-v2").joins(load_hardware("h100-sxm"))
    inter = hardware.collectives.inter
    bare = inter.model_copy(update={"peer_us_per_mib": None})
    links = hardware.collectives.model_copy(update={"inter": bare})
    pipelined = hardware.model_copy(update={"collectives": links})
    extra = {
        n: exchange_ms(hardware, n * 2**20) - exchange_ms(pipelined, n * 2**20) for n in (1, 2, 64)
    }
    assert inter.peer_us_per_mib is not None
    assert extra[1] == pytest.approx(inter.peer_us_per_mib / 16e3, rel=1e-2)
    assert extra[2] == pytest.approx(2 * extra[1], rel=1e-2)
    assert extra[64] == pytest.approx(extra[2], rel=1e-2)


@pytest.mark.parametrize("op", ["all_reduce", "reduce_scatter", "all_gather"])
def test_a_pipeline_that_fills_waits_for_twice_the_mean_of_latency_and_transfer(op: str) -> None:
    """Over hosts of one GPU nothing but the network counts."""
    hardware = Network("efa-v1").joins(load_hardware("a100-80gb"))
    ranks = Topology.uniform(2, 1, hbm_bytes=0, ddr_bytes=0)
    size, links = 2**22, Collectives(hardware, ranks)
    latency = links.floor_ms(op)  # type: ignore[arg-type]
    transfer = bus_factor(op, 2) * size / 6.25e6  # 50 Gbit/s in bytes/ms
    expected = (latency**0.5 + transfer**0.5) ** 2
    assert float(getattr(links, op)(size)) == pytest.approx(expected, rel=5e-3)


def test_switches_that_reduce_send_an_all_reduce_once() -> None:
    hardware = load_hardware("h100-sxm")
    assert Network("ib-ndr-sharp").joins(hardware).collectives.inter.in_network
    ways = {
        kind: Collectives(
            Network(kind).joins(hardware), Topology.uniform(64, 8, hbm_bytes=0, ddr_bytes=0)
        )
        for kind in ("ib-ndr", "ib-ndr-sharp")
    }
    size = 2.0**30
    assert ways["ib-ndr-sharp"].all_reduce(size) <= ways["ib-ndr"].all_reduce(size)
    assert ways["ib-ndr-sharp"].all_to_all(size) == ways["ib-ndr"].all_to_all(size)
