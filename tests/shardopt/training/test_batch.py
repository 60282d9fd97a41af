"""Synthetic batches hold what the model file promises."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torchrec")

import numpy as np
import torch

from predictor.errors import InputError
from predictor.model.distribution import Empirical, Uniform, Zipf
from predictor.model.plan import ShardingPlan
from predictor.model.workload import DcnV2, DenseArch, Feature, Table, Workload
from shardopt.training.batch import batch_ring, popularity_ranks, synthetic_batch
from shardopt.training.loop import Training
from shardopt.training.model import build_model

DENSE = DenseArch(13, (32, 16), (32, 1))


def workload(*tables: Table, dense: DenseArch = DENSE) -> Workload:
    return Workload("m", 2000, tables, dense)


def table(feature: Feature, name: str = "t", rows: int = 100, **more: object) -> Table:
    return Table(name, rows, 16, (feature,), **more)


@pytest.mark.parametrize("factor", [0.3, 1.0, 2.5, 7.0])
def test_lengths_are_floor_or_ceil_with_the_right_mean(factor: float) -> None:
    lengths = synthetic_batch(workload(table(Feature("f", factor)))).sparse["ebc"].lengths()
    assert set(lengths.tolist()) <= {int(np.floor(factor)), int(np.ceil(factor))}
    assert lengths.float().mean().item() == pytest.approx(factor, abs=0.05)


@pytest.mark.parametrize(
    ("alpha", "q", "rows"),
    [(1.05, 0, 1000), (0, 0, 50), (1, 2.5, 300), (2, -0.9, 40), (0.5, 0, 3), (1.2, 0, 1)],
)
def test_zipf_is_exact(alpha: float, q: float, rows: int) -> None:
    """Pearson's chi-square per degree of freedom is 1 on average, here within 5 deviations."""
    draws = 200_000
    ranks = popularity_ranks(Zipf(alpha, q), rows, draws, np.random.default_rng(0))
    expected = (np.arange(1.0, rows + 1) + q) ** -alpha
    expected *= draws / expected.sum()
    counts = np.bincount(ranks, minlength=rows)
    assert len(counts) == rows
    freedom = max(1, rows - 1)
    assert ((counts - expected) ** 2 / expected).sum() / freedom < 1 + 5 * np.sqrt(2 / freedom)


@pytest.mark.parametrize("distribution", [Uniform(), Empirical((10, 90), (8, 1))])
def test_other_distributions_follow_their_bins(distribution: Uniform | Empirical) -> None:
    ranks = popularity_ranks(distribution, 100, 100_000, np.random.default_rng(0))
    bins = distribution.bins(100)
    head = float(bins.slice(0, 10).mass)
    assert (ranks < 10).mean() == pytest.approx(head, abs=0.01)
    assert ranks.min() >= 0
    assert ranks.max() == 99


def test_id_order() -> None:
    """By frequency, id 0 is the hottest; at random, the same hot id is anywhere, every batch."""
    hot = Zipf(1.5)

    def hottest(order: str, index: int) -> int:
        feature = Feature("f", 5.0, distribution=hot, id_order=order)
        batch = synthetic_batch(workload(table(feature)), index=index)
        return int(torch.bincount(batch.sparse["ebc"].values()).argmax())

    assert hottest("frequency", 0) == 0
    assert hottest("random", 0) == hottest("random", 1) != 0


def test_random_order_is_a_permutation() -> None:
    from shardopt.training.batch import _Scatter

    for rows in (1, 2, 3, 5, 17, 1000, 4096):
        assert sorted(_Scatter(rows, seed=3)(np.arange(rows))) == list(range(rows))


def test_batches_repeat_by_seed_and_differ_by_rank_and_index() -> None:
    load = workload(table(Feature("f", 2.0)))
    values = [
        synthetic_batch(load, seed=s, rank=r, index=i).dense
        for s, r, i in [(0, 0, 0), (0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    ]
    assert torch.equal(values[0], values[1])
    assert not any(torch.equal(values[0], value) for value in values[2:])
    assert len({float(batch.dense.sum()) for batch in batch_ring(load)}) == 16


def test_ids_of_a_shared_feature_fit_both_tables() -> None:
    shared = Feature("f", 2.0)
    load = workload(table(shared, "big", 1000), table(shared, "small", 7))
    kjt = synthetic_batch(load).sparse["ebc"]
    assert kjt.keys() == ["f"]
    assert kjt.values().max() < 7
    loss, _ = build_model(load, "cpu")(synthetic_batch(load))
    assert torch.isfinite(loss)


@pytest.mark.parametrize("interaction", ["dot", "concat", DcnV2(2, 8)])
def test_the_model_runs_and_has_the_layers_of_the_file(interaction: str | DcnV2) -> None:
    dense = DenseArch(13, (32, 16), (24, 1), interaction)
    load = workload(
        table(Feature("a", 2.0)),
        table(Feature("b", 0.5), "u", module="sequences", pooling="none"),
        table(Feature("c", 1.5), "w", module="weighted", weighted=True),
        dense=dense,
    )
    loss, logits = build_model(load, "cpu")(synthetic_batch(load))
    loss.backward()
    assert logits.shape == (2000, 1)
    width = 16 + 6 if interaction == "dot" else 4 * 16
    shapes = {name: tuple(p.shape) for name, p in build_model(load).named_parameters()}
    assert shapes["top.0.weight"] == (24, width)
    assert shapes["bottom.2.weight"] == (16, 32)


def test_unpooled_sequences_are_summed() -> None:
    """An EmbeddingCollection's part of the model equals an EmbeddingBagCollection's sum."""
    feature = Feature("f", 1.7)
    sequences = workload(table(feature, pooling="none"))
    bags = workload(table(feature))
    batch = synthetic_batch(bags)
    unpooled, pooled = build_model(sequences, "cpu"), build_model(bags, "cpu")
    with torch.no_grad():
        unpooled.sparse["ebc"].embeddings["t"].weight.copy_(
            pooled.sparse["ebc"].embedding_bags["t"].weight
        )
    torch.testing.assert_close(unpooled.lookup(batch)[0], pooled.lookup(batch)[0])


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ([table(Feature("f", 1.0)), Table("u", 9, 8, (Feature("g", 1.0),))], "dot needs one width"),
        ([table(Feature("f", 1.0, num_poolings=2.0))], "num_poolings 2"),
        (
            [table(Feature("f", 1.0)), table(Feature("g", 1.0), "u", pooling="none")],
            "with and without pooling none",
        ),
        ([table(Feature("f", 1.0), "items")], "table 'items': PyTorch cannot hold"),
        ([table(Feature("f", 1.0), "a.b")], "table 'a.b': PyTorch cannot hold"),
        ([table(Feature("f", 1.0), module="keys")], "module 'keys': PyTorch cannot hold"),
    ],
)
def test_models_that_cannot_be_built(tables: list[Table], words: str) -> None:
    with pytest.raises(InputError, match=words):
        build_model(workload(*tables))


@pytest.mark.parametrize("pipeline", ["prefetch_sparse_dist", "semi_sync"])
def test_pipelines_of_gpus_are_refused_on_cpus(pipeline: str) -> None:
    model = replace(workload(table(Feature("f", 1.0))), train_pipeline=pipeline)
    with pytest.raises(InputError, match=f"{pipeline} .*cannot run on CPUs"):
        Training(model, ShardingPlan({}, 1, 1), torch.device("cpu"), batch_ring(model))


@pytest.mark.parametrize("how", ["gather", "all"])
def test_pairs_are_the_same_however_they_are_taken(how: str) -> None:
    from shardopt.training.model import Dot

    vectors = [torch.randn(4, 8) for _ in range(3)]
    device = torch.device("cpu")
    plain = Dot(3, device, "index", 8 + 3)(vectors)
    pairs = Dot(3, device, how, 16 if how == "gather" else 24)(vectors)
    assert pairs.shape[1] % 8 == 0
    products = torch.stack(vectors, 1) @ torch.stack(vectors, 1).transpose(1, 2)
    beside = plain[:, 8:] if how == "gather" else products.flatten(1)
    expected = torch.cat([vectors[0], beside], dim=1)
    assert torch.allclose(pairs[:, : expected.shape[1]], expected)
    assert not pairs[:, expected.shape[1] :].any()
