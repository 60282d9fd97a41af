"""Ids that TorchRec looks up on two gloo ranks where each sends the distinct ids of its batch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from predictor.cost.loads import Load, ShardLoads
from predictor.model.distribution import Uniform, Zipf
from predictor.model.plan import ShardingPlan, ShardingType
from predictor.model.workload import DenseArch, Feature, Table, Workload
from shardopt.training.batch import batch_ring
from shardopt.training.loop import Training
from tests.builders import a_topology, hardware, plan_of, sharded
from tests.distributed.ranks import on_ranks

pytestmark = pytest.mark.distributed
STEPS = 12


def workload(*, dedup: bool = True) -> Workload:
    """Histories of few and of many distinct ids."""
    distributions = {"a": Zipf(1.05), "b": Uniform()}
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
        for name, distribution in distributions.items()
    ]
    return Workload("histories", 128, tuple(tables), DenseArch(13, (16,), (16, 1), "concat"))


def unique_by_feature(
    hash_size_cumsum: torch.Tensor,
    hash_size_offsets: torch.Tensor,
    offsets: torch.Tensor,
    values: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """`fbgemm::jagged_unique_indices`, which FBGEMM has for GPUs only, of one feature a table:
    lengths, offsets, ids, inverse."""
    features = len(hash_size_offsets) - 1
    batch = (len(offsets) - 1) // features
    bounds = offsets[::batch].tolist()
    ids, inverse, lengths, before = [], [], [], 0
    for first, last in pairwise(bounds):
        unique_ids, back = torch.unique(values[first:last], return_inverse=True)
        ids.append(unique_ids)
        inverse.append(back + before)
        before += len(unique_ids)
        of_samples = torch.zeros(batch, dtype=torch.int64)
        of_samples[: len(unique_ids) % batch] = 1
        lengths.append(of_samples + len(unique_ids) // batch)
    all_lengths = torch.cat(lengths)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), all_lengths.cumsum(0)])
    return all_lengths, ends, torch.cat(ids), torch.cat(inverse)


def looked_up(load: Workload, plan: ShardingPlan) -> list[int]:
    """The ids that this rank's lookups were given, batch by batch."""
    library = torch.library.Library("fbgemm", "IMPL")
    library.impl("jagged_unique_indices", unique_by_feature, "CPU")
    ring = batch_ring(load, rank=dist.get_rank(), size=STEPS)
    training = Training(load, plan, torch.device("cpu"), ring)
    counts: list[int] = []

    def count(_: Any, inputs: tuple[Any, ...]) -> None:
        counts.append(int(inputs[0].values().numel()))

    for lookup in training.model.sparse["ec"]._lookups:
        lookup.register_forward_pre_hook(count)
    for _ in range(STEPS):
        training.step()
    return counts


@pytest.mark.parametrize("kind", [ShardingType.TABLE_WISE, ShardingType.ROW_WISE])
def test_as_many_ids_are_looked_up_as_predicted(kind: ShardingType) -> None:
    model, topology = workload(), a_topology(2)
    tables = sharded(model, topology, kind)
    expected = np.zeros(2)
    loads, raw = (ShardLoads(w, topology, hardware()) for w in (model, workload(dedup=False)))
    sent = 0.0
    for index, table in enumerate(tables):
        ranks, found = loads.of_table(index, table)
        np.add.at(expected, ranks, found[:, Load.IDS])
        sent += float(raw.of_table(index, table)[1][:, Load.IDS].sum())
    assert expected.sum() < 0.7 * sent
    counts = on_ranks(looked_up, model, plan_of(model, topology, tables))
    assert np.mean(counts, axis=1) == pytest.approx(expected, rel=0.03)
