"""TorchRec's reservation: margin, dense part and ids."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lab.planners.reservation import dense_parameters, reserve_topology
from predictor.errors import InfeasibleError
from predictor.model.topology import Topology
from predictor.units import GIB
from tests.builders import a_workload

TOPOLOGY = Topology.uniform(2, hbm_bytes=GIB, ddr_bytes=GIB)


def test_reserve() -> None:
    workload = a_workload()
    ids = 8 * sum(t.lookups_per_sample for t in workload.tables) * workload.batch_size
    rest = 6 * 4 * dense_parameters(workload) + 20 * ids
    left = reserve_topology(workload, TOPOLOGY, 0.25)
    assert left.hbm_cap_bytes == (GIB * 3 // 4 - rest,) * 2
    assert left.ddr_cap_bytes == TOPOLOGY.ddr_cap_bytes
    assert reserve_topology(workload, TOPOLOGY, device="cpu").ddr_cap_bytes == (GIB - rest,) * 2
    with pytest.raises(InfeasibleError, match="rank"):
        reserve_topology(workload, replace(TOPOLOGY, hbm_cap_bytes=(1000, 1000)))
