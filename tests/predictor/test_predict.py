"""Predictions: directions, sums, provenance, messages, and every shipped model."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predictor.hardware.schema import HardwareProfile, weakest
from predictor.iteration.critical_path import Segment
from predictor.model.distribution import Uniform, Zipf
from predictor.model.memory.peak import memory_of_plan
from predictor.model.memory.ranks import shard_memory
from predictor.model.plan import ComputeKernel, ShardingType
from predictor.model.topology import Topology
from predictor.model.workload import INFERENCE, MODES, Feature, Workload
from predictor.predict import (
    ITERATION_ERROR,
    PHASES,
    Prediction,
    iteration_interval,
    predict,
    profile_groups,
)
from search.space.enumerate import enumerate_space
from shardopt.config.model import load_model
from tests.builders import (
    Candidate,
    a_table,
    a_topology,
    a_workload,
    device_bound,
    hardware,
    in_turns,
    plan_of,
    random_candidate,
    random_workload,
    sharded,
)
from tests.quick import quick_first, quick_only

T = ShardingType
MODELS = sorted((Path(__file__).parents[2] / "configs/models").glob("*.yaml"))
TRAINED = ("dense_backward", "output_dist_backward", "embedding_backward")
PIPELINES = ["base", "sparse_dist", "prefetch_sparse_dist"]


def test_inference_is_the_forward_part_alone() -> None:
    """Its operations, dense and sparse, cost what they do in training, and nothing else is left."""
    topology = a_topology(4)
    workload = a_workload(a_table("a", 10**6), a_table("b", 10**5), batch_size=8192)
    plan = in_turns(workload, topology)
    served = replace(workload, mode=INFERENCE)
    trained, alone = (predict(w, topology, device_bound(), plan) for w in (workload, served))
    after = (*TRAINED, "optimizer", "all_reduce")
    forward = {op.name: op.cost_ms for op in trained.graph.ops if op.phase not in after}
    assert {op.name for op in alone.graph.ops} == {*forward}
    assert all(np.array_equal(op.cost_ms, forward[op.name]) for op in alone.graph.ops)
    assert alone.iteration_ms < 0.6 * trained.iteration_ms
    assert not {*alone.breakdown} & {*after}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_inference_has_no_states_and_no_gradients(device: str) -> None:
    topology = a_topology(2)
    table = a_table("a", 10**6, 64, optimizer="adam", data_type="int8")
    workload = a_workload(table, mode=INFERENCE)
    for kernel in ("fused", "fused_uvm", "dense"):
        kind = T.TABLE_WISE, ComputeKernel(kernel), [(10**6, 64)]
        (memory,) = shard_memory(table, workload, topology, *kind, device=device)
        assert memory.optimizer_bytes == memory.dense_bytes == 0
        assert memory.hbm_bytes + memory.ddr_bytes == 10**6 * 80 + memory.io_bytes
    plan = in_turns(workload, topology)
    trained, served = (
        memory_of_plan(replace(workload, mode=mode), topology, plan, device)[0].peak
        for mode in MODES
    )
    assert trained is not None
    assert served is not None
    adam = replace(workload, dense=replace(workload.dlrm, optimizer="adam"))
    assert memory_of_plan(adam, topology, plan, device)[0].peak == served
    # two moments of fp32, gradients and their sorting
    assert trained.allocated_bytes - served.allocated_bytes > 10**6 * 64 * 8


def run(
    workload: Workload,
    topology: Topology,
    candidate: Candidate,
    profile: HardwareProfile | None = None,
) -> Prediction:
    plan = plan_of(workload, topology, candidate)
    return predict(workload, topology, profile or device_bound(), plan)


def hot(alpha: float | None, order: str = "random", pooling_factor: float = 60.0) -> Workload:
    distribution = Uniform() if alpha is None else Zipf(alpha)
    feature = Feature("f", pooling_factor, 1.0, distribution, order)
    return a_workload(a_table(rows=10**7, dim=128, features=(feature,)), batch_size=4096)


def of_varying_lengths(workload: Workload) -> Workload:
    """The workload with lengths that vary in its first table, so that ranks wait."""
    first, *others = workload.tables
    features = tuple(replace(f, pooling_factor_std=2.0) for f in first.features)
    return replace(workload, tables=(replace(first, features=features), *others))


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_parts_sum_to_the_iteration_and_the_interval_holds_it(pipeline: str) -> None:
    for seed, topology in enumerate([a_topology(1), a_topology(2), a_topology(8, 4)] * 2):
        workload = of_varying_lengths(random_workload(seed, pipeline))
        space, pick = enumerate_space(workload, topology), random.Random(seed)
        for profile in (hardware(), device_bound(), hardware("cpu-gloo")):
            prediction = run(workload, topology, random_candidate(space, topology, pick), profile)
            assert sum(prediction.breakdown.values()) == pytest.approx(
                prediction.iteration_ms, rel=1e-9
            )
            assert set(prediction.breakdown) <= set(PHASES)
            low, high = prediction.interval_ms
            assert 0 < low <= prediction.iteration_ms <= high
            path = prediction.critical_path
            for before, after in pairwise(path):
                assert before.end_ms == pytest.approx(after.start_ms)
            for rank in prediction.per_rank:
                busy = sum(
                    op.cost_ms[..., min(rank.rank, op.cost_ms.shape[-1] - 1)].item()
                    for op in prediction.graph.ops
                )
                assert sum(rank.busy_ms.values()) == pytest.approx(busy)
                assert 0 <= rank.idle_ms <= prediction.iteration_ms


def with_errors(profile: HardwareProfile, **errors: float) -> HardwareProfile:
    """The profile with these stated errors of groups and links."""

    def stated(section: Any, names: Iterable[str]) -> Any:
        groups = {
            name: getattr(section, name).model_copy(update={"rel_error": errors[name]})
            for name in names
        }
        return section.model_copy(update=groups)

    links = stated(profile.collectives, ["intra", "inter"])
    return stated(profile, ["gemm", "embedding"]).model_copy(update={"collectives": links})


def test_the_interval_holds_nine_iterations_of_ten_that_are_off_by_the_stated_errors() -> None:
    """Each part is off by its own error, the exchange by that of the worse link, and the iteration
    by what software and whole iterations are off by."""
    errors = {"gemm": 0.1, "embedding": 0.15, "intra": 0.01, "inter": 0.15}
    profile = with_errors(hardware("cpu-gloo"), **errors)
    path = [
        Segment("a", "dense_forward", "gemm", 0, 0.0, 4.0),
        Segment("b", "embedding_forward", "embedding", 0, 4.0, 7.0),
        Segment("c", "output_dist_forward", "collectives", 0, 7.0, 10.0),
    ]
    low, high = iteration_interval(10.0, path, profile, a_topology(4, 2), software_error=0.05)
    own = ITERATION_ERROR[profile.execution]
    assert own is not None
    sizes = [0.4 * 0.1, 0.3 * 0.15, 0.3 * 0.15, own, 0.05]
    off = np.random.default_rng(0).standard_normal((4000, len(sizes))) @ sizes
    times = 10.0 * np.exp(off)
    assert np.mean((times >= low) & (times <= high)) == pytest.approx(0.9, abs=0.015)


def test_segments_of_one_resource_are_off_together() -> None:
    profile, topology = hardware(), a_topology(4, 2)
    whole, *parts = (
        Segment("a", "dense_forward", "gemm", 0, start_ms, end_ms)
        for start_ms, end_ms in ((0.0, 4.0), (0.0, 1.0), (1.0, 4.0))
    )
    assert iteration_interval(4.0, parts, profile, topology) == pytest.approx(
        iteration_interval(4.0, [whole], profile, topology)
    )


def test_a_rank_is_idle_where_its_compute_stream_waits() -> None:
    workload, topology = hot(None), a_topology(2)
    prediction = run(workload, topology, sharded(workload, topology, T.TABLE_WISE))
    for rank in prediction.per_rank:
        own = [op for op in prediction.graph.ops if op.stream == "compute"]
        busy = sum(op.cost_on(rank.rank) for op in own)
        assert len(own) < len(prediction.graph.ops)
        assert rank.idle_ms == pytest.approx(max(0.0, prediction.iteration_ms - busy))
        assert busy < sum(rank.busy_ms.values())


def test_provenance_is_the_weakest_on_the_path() -> None:
    workload, topology = hot(None), a_topology(2)
    prediction = run(workload, topology, sharded(workload, topology, T.TABLE_WISE))
    groups = [
        group
        for segment in prediction.critical_path
        for group in profile_groups(segment.resource, device_bound(), topology)
    ]
    assert prediction.provenance == weakest(tuple(g.provenance.kind for g in groups))
    profile = device_bound()
    poor = profile.embedding.provenance.model_copy(update={"kind": "not validated"})
    embedding = profile.embedding.model_copy(update={"provenance": poor})
    weak = profile.model_copy(update={"embedding": embedding})
    assert run(workload, topology, sharded(workload, topology, T.TABLE_WISE), weak).provenance == (
        "not validated"
    )


def grown(workload: Workload, rows: float = 1, dims: int = 1, ids: float = 1) -> Workload:
    """The workload with tables that are larger, or read more often, by these factors."""
    tables = tuple(
        replace(
            t,
            # in a table of a few rows, more of them make the hottest row colder
            num_embeddings=int(t.num_embeddings * (rows if t.num_embeddings > 1000 else 1)),
            embedding_dim=t.embedding_dim * dims,
            features=tuple(
                replace(f, pooling_factor=f.pooling_factor * ids, pooling_factor_std=std)
                for f in t.features
                for std in [f.pooling_factor_std and f.pooling_factor_std * ids]
            ),
        )
        for t in workload.tables
    )
    return replace(workload, tables=tables)


@pytest.mark.parametrize("seed", quick_first(4, range(30)))
@pytest.mark.parametrize("profile", ["h100-sxm", "cpu-gloo"])
def test_time_never_falls_when_work_grows_nor_rises_when_ids_vanish(
    seed: int, profile: str
) -> None:
    """Within the approximations of cache hits; a launch that waits for the hottest row gains by
    more rows."""
    pick = random.Random(seed)
    workload = random_workload(seed, pick.choice(PIPELINES))
    if pick.random() < 0.5:
        workload = of_varying_lengths(workload)
    topology = a_topology(pick.choice([1, 2, 8]))
    kind = pick.choice([T.TABLE_WISE, T.ROW_WISE])

    def time(model: Workload) -> float:
        return run(
            model, topology, sharded(model, topology, kind), device_bound(profile)
        ).iteration_ms

    usual = time(workload)
    by_ids = [time(grown(workload, ids=10.0**-power)) for power in (200, 20, 8, 4, 2, 1)]
    assert by_ids[0] > 0
    for less, more in pairwise([*by_ids, usual]):
        assert less <= more * (1 + 1e-6)
    assert time(grown(workload, ids=1.5)) >= usual * (1 - 1e-3)
    assert time(grown(workload, rows=3)) >= usual * (1 - 1e-2)
    assert time(grown(workload, dims=2)) >= usual * (1 - 1e-3)
    assert time(workload.with_batch_size(2 * workload.batch_size)) >= usual * (1 - 1e-3)
    # every shard serves the samples of more ranks
    wider = a_topology(2 * topology.world_size)
    same = sharded(workload, topology, kind)
    assert run(workload, wider, same, device_bound(profile)).iteration_ms >= usual * (1 - 1e-3)


def test_skew_makes_lookups_faster_and_a_frequency_order_makes_the_first_shard_hot() -> None:
    topology = a_topology(4)
    times = []
    for alpha in (None, 0.6, 0.9):
        workload = hot(alpha)
        times.append(run(workload, topology, sharded(workload, topology, T.ROW_WISE)).iteration_ms)
    assert times == sorted(times, reverse=True)
    assert times[-1] < 0.95 * times[0]
    spread, sorted_ids = hot(0.9), hot(0.9, "frequency")
    even = run(spread, topology, sharded(spread, topology, T.ROW_WISE))
    uneven = run(sorted_ids, topology, sharded(sorted_ids, topology, T.ROW_WISE))
    busy = [r.busy_ms["embedding_forward"] for r in uneven.per_rank]
    assert busy[0] > 2 * busy[1] > 2 * busy[3]
    assert len({r.busy_ms["embedding_forward"] for r in even.per_rank}) == 1
    assert uneven.iteration_ms > even.iteration_ms


def test_a_pipeline_changes_the_graph_and_hides_the_input_distribution() -> None:
    topology = a_topology(2)
    for seed in range(8):
        predictions = []
        for pipeline in PIPELINES:
            workload = random_workload(seed, pipeline)
            space = enumerate_space(workload, topology)
            candidate = random_candidate(space, topology, random.Random(seed))
            predictions.append(run(workload, topology, candidate))
        base, sparse, _ = predictions
        assert sparse.iteration_ms <= base.iteration_ms * (1 + 1e-9)
        deps = [[(o.name, o.deps) for o in p.graph.ops] for p in predictions]
        assert deps[0] != deps[1] != deps[2]
    workload = hot(None)
    plan = sharded(workload, topology, T.TABLE_WISE)
    times = [
        run(replace(workload, train_pipeline=p), topology, plan).iteration_ms for p in PIPELINES
    ]
    assert times[1] < 0.99 * times[0]


@pytest.mark.parametrize("path", MODELS, ids=lambda p: p.stem)
@pytest.mark.parametrize("ranks", quick_only([16], [1, 2, 8, 16]))
def test_every_shipped_model_has_a_time(path: Path, ranks: int) -> None:
    workload, topology = load_model(path), a_topology(ranks)
    prediction = predict(workload, topology, hardware(), in_turns(workload, topology))
    assert 0.1 < prediction.iteration_ms < 1000
    assert len(prediction.memory) == len(prediction.per_rank) == ranks
