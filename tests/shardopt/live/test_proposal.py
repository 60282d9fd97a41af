"""What the ids of a window make of a workload."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torchrec")

from predictor.model.workload import Workload
from shardopt.live.proposal import observed_workload
from shardopt.stats.collect import ReadOptions
from shardopt.stats.counts import Bags, FeatureCounts
from shardopt.stats.result import summarise
from tests.distributed import live_case as case


def observed(load: Workload, lengths: list[int], path: Path) -> Workload:
    """After samples of so many ids of the first feature."""
    counts = FeatureCounts(1000)
    ids = np.arange(sum(lengths), dtype=np.int64) % 100
    counts.add(Bags(ids, np.array(lengths, dtype=np.int64)))
    found = summarise({"f0": counts}, ReadOptions(rows={"f0": 5000}), 0)
    return observed_workload(load, list(found), path / "stats.npz")


def test_the_spread_of_the_ids_per_sample_is_handed_on(tmp_path: Path) -> None:
    feature, other = (
        table.features[0] for table in observed(case.workload(), [10, 50] * 20, tmp_path).tables[:2]
    )
    assert feature.pooling_factor == 30
    assert feature.pooling_factor_std == pytest.approx(20)
    assert other == case.workload().tables[1].features[0], "nobody counted it"


def test_no_spread_beyond_floor_and_ceiling(tmp_path: Path) -> None:
    load = case.workload()
    spread = replace(load.tables[0].features[0], pooling_factor_std=5.0)
    load = replace(load, tables=(replace(load.tables[0], features=(spread,)), *load.tables[1:]))
    found = observed(load, [3, 4] * 20, tmp_path).tables[0].features[0]
    assert (found.pooling_factor, found.pooling_factor_std) == (3.5, None)
