"""The laboratory's TorchRec, re-derived, against the real one: memory reserved, plans rated."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest

pytest.importorskip("torchrec")

from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation

from lab.planners.published import TorchRecObjective
from lab.planners.reservation import reserve_topology
from lab.planners.run import torchrecs_search
from predictor.model.workload import Workload
from predictor.units import GIB
from shardopt.torchrec.read_module import parameter_constraints
from shardopt.training.torchrec_planner import plan_with_torchrec, torchrec_topology
from tests.quick import quick_only
from tests.torchrec_parity import modules


@pytest.mark.parametrize("model", [modules.dlrm_dcnv2, modules.criteo_kaggle, modules.unpooled])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_same_reservation(model: Callable[[], Workload], device: str) -> None:
    workload, topology = model(), modules.topology(8)
    if workload.name == "unpooled":
        tables = tuple(replace(t, features=t.features[:1]) for t in workload.tables)
        workload = replace(workload, tables=tables)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "HeuristicalStorageReservation is known", FutureWarning)
        reserved = HeuristicalStorageReservation(percentage=0.15).reserve(
            torchrec_topology(topology, device),
            workload.batch_size,
            modules.build(workload),
            [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()],
            parameter_constraints(workload),
        )
    ours = reserve_topology(workload, topology, 0.15, device)
    storage = reserved.devices[0].storage
    if device == "cuda":
        assert ours.hbm_cap_bytes[0] == storage.hbm
    assert ours.ddr_cap_bytes[0] == storage.ddr


@pytest.mark.parametrize("variant", ["default", "dynamic", "balanced"])
@pytest.mark.parametrize(
    "model", quick_only([modules.mixed], [modules.criteo_kaggle, modules.mixed, modules.unpooled])
)
def test_plans_are_rated_as_torchrec_rates_them(
    model: Callable[[], Workload], variant: str
) -> None:
    workload, topology = model(), modules.topology(8, hbm=GIB)
    answer = plan_with_torchrec(workload, topology, **torchrecs_search(variant))
    assert answer.plan is not None
    torchrec = TorchRecObjective(workload, topology)
    tables = [answer.plan.tables[key] for key in workload.keys]
    assert torchrec.rating_ms(tables) == pytest.approx(answer.rating_ms, rel=1e-9)
    assert torchrec.fits(tables)
