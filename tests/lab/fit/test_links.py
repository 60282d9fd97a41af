"""Curves between hosts: the shipped ones are those of the rules, and what no rule saw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lab.fit.links import RDMA_GBIT_S, SEND_RECV_US, inter_curves, rdma, slingshot, tcpx
from lab.validate.links import read_links
from predictor.cost.collectives import Collectives, latency_ms
from predictor.csv_rows import Row, number, read_table
from predictor.hardware.loader import load_hardware
from predictor.hardware.networks import Network
from predictor.model.topology import Topology
from predictor.units import gb_per_s, us
from tests.data.excerpt import SIMAI_FILE, SIMAI_HOSTS
from tests.public_data import every_table


@every_table
def test_bytes_past_a_nic_cost_what_rings_over_two_hosts_did(folder: Path) -> None:
    curves = inter_curves(rdma(folder), SEND_RECV_US["h100"])
    shipped = load_hardware("h100-sxm").collectives.inter
    assert shipped.nic_gbit_s == RDMA_GBIT_S
    for op in ("all_reduce", "reduce_scatter", "all_gather"):
        fitted, curve = getattr(shipped, op), curves[op]
        assert fitted.edge_mib == curve.edge_mib
        assert fitted.us_per_mib == pytest.approx(curve.us_per_mib, rel=1e-3)
        assert latency_ms(fitted, 4) == pytest.approx(latency_ms(curve, 4))
    slower = load_hardware("a100-80gb").collectives.inter
    assert slower.all_gather.us_per_mib[-1] == pytest.approx(2 * curve.us_per_mib[-1], rel=1e-3)


@every_table
def test_slingshot_and_tcpx_follow_their_rows(folder: Path) -> None:
    rows, _ = read_links(folder)
    node = load_hardware("gh200").collectives
    within = latency_ms(node.intra.all_reduce, 4) / us(1.0)
    curve = slingshot(rows, within)
    assert node.inter.all_reduce.us_per_mib == pytest.approx(curve.us_per_mib, rel=1e-3)
    assert node.inter.all_gather.latency_per_rank_us == pytest.approx(curve.latency_us, rel=1e-2)
    shipped = Network("tcpx").joins(load_hardware("h100-sxm")).collectives
    over_tcp, empty = tcpx(rows), latency_ms(shipped.intra.all_gather, 8) / us(1.0)
    link = shipped.inter.all_gather
    assert link.us_per_mib == pytest.approx(over_tcp.us_per_mib, rel=1e-3)
    assert link.edge_mib == pytest.approx(over_tcp.edge_mib, rel=1e-3)
    assert link.latency_us + empty == pytest.approx(over_tcp.latency_us, rel=1e-2)


@every_table
def test_all_to_alls_over_hosts_against_efficiencies_that_no_rule_saw(folder: Path) -> None:
    """SimAI gives the share of the line rate at which bytes leave a host of eight."""
    hardware = load_hardware("h100-sxm")
    rate = gb_per_s(hardware.collectives.inter.nic_gbit_s / 8)

    def sizes_and_shares(row: Row) -> tuple[float, dict[str, float]]:
        return number(row, "Size"), {column: number(row, column) for column in SIMAI_HOSTS}

    table = read_table(folder / SIMAI_FILE, ("Size", *SIMAI_HOSTS), sizes_and_shares)
    assert not table.problems
    errors = []
    for column, hosts in SIMAI_HOSTS.items():
        top = Topology.uniform(8 * hosts, 8, hbm_bytes=1, ddr_bytes=1)
        engine = Collectives(hardware, top)
        for size, shares in table.rows:
            measured = size * (hosts - 1) / hosts / (shares[column] * rate)
            errors.append(float(engine.all_to_all(size)) / measured - 1)
    assert len(errors) == 44
    assert np.abs(errors).mean() < 0.09
