"""Networks between hosts by kind, and what they change of a profile."""

from __future__ import annotations

import pytest

from predictor.cost.collectives import Collectives
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
