"""Ids that TorchRec looks up on two gloo ranks where each sends the distinct ids of its batch."""

import json
from pathlib import Path

import numpy as np
import pytest

from predictor.cost.loads import Load, ShardLoads
from predictor.model.distribution import Uniform, Zipf
from predictor.model.plan import ShardingType
from predictor.model.plan_json import plan_to_dict
from predictor.model.workload import DenseArch, Feature, Table, Workload
from shardopt.cli.output import to_json
from shardopt.config.write import write_model
from tests.builders import a_topology, hardware, plan_of, sharded

pytest.importorskip("torchrec")
from tests.distributed.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def workload(*, dedup: bool = True) -> Workload:
    """Histories of few and of many distinct ids."""
    of = {"a": Zipf(1.05), "b": Uniform()}
    tables = [
        Table(
            f"t_{name}",
            4000,
            16,
            (Feature(f"f_{name}", 40.0, distribution=distribution, pooling_factor_std=20.0),),
            "ec",
            pooling="none",
            index_dedup=dedup,
        )
        for name, distribution in of.items()
    ]
    return Workload("histories", 128, tuple(tables), DenseArch(13, (16,), (16, 1), "concat"))


@pytest.mark.parametrize("kind", [ShardingType.TABLE_WISE, ShardingType.ROW_WISE])
def test_as_many_ids_are_looked_up_as_predicted(tmp_path: Path, kind: ShardingType) -> None:
    made, topology = workload(), a_topology(2)
    write_model(tmp_path / "model.yaml", made)
    tables = sharded(made, topology, kind)
    plan = plan_of(made, topology, tables)
    (tmp_path / "plan.json").write_text(to_json(plan_to_dict(plan)))
    run_ranks("dedup_worker", tmp_path)

    expected = np.zeros(2)
    loads, raw = (ShardLoads(w, topology, hardware()) for w in (made, workload(dedup=False)))
    sent = 0.0
    for index, table in enumerate(tables):
        ranks, found = loads.of_table(index, table)
        np.add.at(expected, ranks, found[:, Load.IDS])
        sent += float(raw.of_table(index, table)[1][:, Load.IDS].sum())
    assert expected.sum() < 0.7 * sent
    for rank in (0, 1):
        counts = json.loads((tmp_path / f"ids.{rank}.json").read_text())
        assert np.mean(counts) == pytest.approx(expected[rank], rel=0.03)
