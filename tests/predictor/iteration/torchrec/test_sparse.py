"""Messages of every sharding type: their collectives and bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from predictor.cost.collectives import Collectives
from predictor.cost.elementwise import memory_ms
from predictor.cost.loads import COLUMNS
from predictor.iteration.plan_scorer import PlanScorer
from predictor.iteration.torchrec.sparse import Exchange, exchanges
from predictor.model.plan import ComputeKernel, ShardingType
from predictor.model.topology import Topology
from predictor.model.workload import Feature, QComm, Table, Workload
from tests.builders import a_table, a_topology, a_workload, device_bound, hardware, sharded

T = ShardingType
B, DIM = 1024, 64
HOSTS = a_topology(8, 4)


def exchange_of(
    workload: Workload,
    topology: Topology,
    kind: ShardingType,
    kernel: ComputeKernel = ComputeKernel.FUSED,
    profile: str = "h100-sxm",
) -> Exchange:
    batch = PlanScorer(workload, topology, hardware(profile))
    candidate = sharded(workload, topology, kind, kernel)
    for index, plan in enumerate(candidate):
        batch.number(index, plan)
    totals = batch.totals(candidate)
    return exchanges(batch.costs, batch.groups, totals[None])[0]


def transfers(exchange: Exchange, *, backward: bool = False) -> list[tuple[str, str, float]]:
    return [
        (t.name.split(".")[-1], t.scope, t.cost_ms.item())
        for t in exchange.outputs(backward=backward)
    ]


ROWS_OF_ALL = 8 * B * DIM * 4
"""Bytes a rank with the whole table sends: pooled rows for the samples of all eight ranks."""


@pytest.mark.parametrize(
    ("kind", "forward", "backward"),
    [
        (T.TABLE_WISE, ["all_to_all"], ["all_to_all"]),
        (T.ROW_WISE, ["reduce_scatter"], ["all_gather"]),
        (T.TABLE_ROW_WISE, ["reduce_scatter", "all_to_all"], ["all_to_all", "all_gather"]),
    ],
)
def test_collectives_of_pooled_tables(
    kind: ShardingType, forward: list[str], backward: list[str]
) -> None:
    exchange = exchange_of(a_workload(a_table(dim=DIM), batch_size=B), HOSTS, kind)
    collectives = Collectives(hardware(), HOSTS)
    for names, way in ((forward, False), (backward, True)):
        sent = transfers(exchange, backward=way)
        assert len(sent) == len(names)
        for name, (_, scope, cost) in zip(names, sent, strict=True):
            size = ROWS_OF_ALL / 4 if scope == "cross" else ROWS_OF_ALL
            assert cost == pytest.approx(getattr(collectives, name)(size, scope=scope).item())
        scopes = [scope for _, scope, _ in sent]
        if kind is T.TABLE_ROW_WISE:
            assert scopes == (["cross", "intra"] if way else ["intra", "cross"])
        else:
            assert scopes == ["world"]


@pytest.mark.parametrize("kind", [T.TABLE_WISE, T.ROW_WISE, T.COLUMN_WISE])
def test_sequences_take_an_all_to_all_of_a_row_per_id(kind: ShardingType) -> None:
    table = a_table(rows=80_000, dim=256, pooling="none", features=(Feature("f", 3.0),))
    exchange = exchange_of(a_workload(table, batch_size=B), HOSTS, kind)
    shards = {T.TABLE_WISE: 1, T.ROW_WISE: 8, T.COLUMN_WISE: 2}[kind]
    size = 3 * 8 * B * 256 * 4 / shards
    cost = Collectives(hardware(), HOSTS).all_to_all(size).item()
    for backward in (False, True):
        assert transfers(exchange, backward=backward) == [
            ("all_to_all", "world", pytest.approx(cost, rel=1e-6))
        ]


def ids_ms(table: Table, kind: ShardingType) -> float:
    return exchange_of(a_workload(table, batch_size=B), HOSTS, kind).ids_ms().item()


def test_lengths_ids_and_weights_travel_one_by_one() -> None:
    collectives = Collectives(hardware(), HOSTS)
    plain, weighted = a_table(), a_table(weighted=True)
    lengths = collectives.all_to_all(8 * B * 4).item()
    ids = collectives.all_to_all(8 * B * 2 * 8).item()
    weights = collectives.all_to_all(8 * B * 2 * 4).item()
    assert ids_ms(plain, T.TABLE_WISE) == pytest.approx(lengths + ids)
    assert ids_ms(weighted, T.TABLE_WISE) == pytest.approx(lengths + ids + weights)
    # bucketized: every rank gets lengths of all samples, but its part of the ids alone
    part = collectives.all_to_all(8 * B * 2 * 8 / 8).item()
    assert ids_ms(plain, T.ROW_WISE) == pytest.approx(lengths + part)
    part = collectives.all_to_all(8 * B * 2 * 8 / 4).item()
    assert ids_ms(plain, T.TABLE_ROW_WISE) == pytest.approx(lengths + part)


@pytest.mark.parametrize("profile", ["h100-sxm", "cpu-gloo"])
@pytest.mark.parametrize("kind", [T.TABLE_WISE, T.ROW_WISE, T.TABLE_ROW_WISE])
def test_row_splits_bucketize_before_they_send(kind: ShardingType, profile: str) -> None:
    hw, ids = hardware(profile), 2 * B
    exchange = exchange_of(a_workload(batch_size=B), HOSTS, kind, profile=profile)
    expected = memory_ms(hw, 2 * 8 * ids).item()
    if kind is not T.TABLE_WISE:
        sorted_ms = 1e-6 * hw.elementwise.bucketize_ns_per_id * ids
        walked_ms = exchange.lookups.bucketize_ms(2)
        expected = memory_ms(hw, 4 * 8 * ids).item() + sorted_ms + walked_ms
        assert (sorted_ms > 0) == (walked_ms == 0) == (profile == "cpu-gloo")
    assert exchange.permute_ms().item() == pytest.approx(expected, rel=1e-9)


def test_a_thread_walks_down_the_longest_bag_of_a_module() -> None:
    def permute_ms(kind: ShardingType, longest: float) -> float:
        features = (Feature("a", 2.0), Feature("b", longest))
        workload = a_workload(a_table(features=features), batch_size=32)
        return float(exchange_of(workload, HOSTS, kind).permute_ms().item())

    more = permute_ms(T.ROW_WISE, 2048.0) - permute_ms(T.ROW_WISE, 48.0)
    assert more > 2000 * 0.5e-3 > 10 * (permute_ms(T.TABLE_WISE, 2048.0))


def wide_of(kind: ShardingType) -> Table:
    """One that every sharding type but data-parallel may split into several parts."""
    only = replace(a_table().constraints, sharding_types=(kind,))
    return a_table(rows=80_000, dim=256, constraints=only)


def copied(ms: np.ndarray, elements: float, columns: bool = True) -> np.ndarray:
    """Count how often these floats are read and written in that time, at the speed of a CPU."""
    hw = hardware("cpu-gloo")
    share = hw.elementwise.columns if columns else 1.0
    return ms / (2 * 4 * elements / (hw.streaming * share))


@pytest.mark.parametrize(
    ("kind", "forward", "backward"),
    [
        (T.TABLE_WISE, 1, 2),
        (T.COLUMN_WISE, 2, 3),
        (T.TABLE_COLUMN_WISE, 2, 3),
        (T.ROW_WISE, 0, 0),
        (T.TABLE_ROW_WISE, 1, 2),
        (T.GRID_SHARD, 2, 3),
        (T.DATA_PARALLEL, 0, 0),
    ],
)
def test_received_outputs_are_copied_as_often_as_their_type_needs(
    kind: ShardingType, forward: int, backward: int
) -> None:
    """In the second plan, other exchanges of the module are used: one copy more."""
    kernel = ComputeKernel.DENSE if kind is T.DATA_PARALLEL else ComputeKernel.FUSED
    workload = a_workload(wide_of(kind), batch_size=B)
    exchange = exchange_of(workload, HOSTS, kind, kernel, "cpu-gloo")
    for way, copies in ((False, forward), (True, backward)):
        unpacked = exchange.unpack_ms(np.array([False, True]), backward=way)
        assert unpacked.shape == (2, 1)
        # whatever the type: the samples of one rank
        assert copied(unpacked[:, 0], B * 256) == pytest.approx([copies, copies + 1])


def test_data_parallel_tables_sync_their_whole_gradient_at_once() -> None:
    table = a_table(rows=200_000, dim=DIM)
    exchange = exchange_of(a_workload(table), HOSTS, T.DATA_PARALLEL, ComputeKernel.DENSE)
    size = 200_000 * DIM * 4
    assert exchange.is_local
    assert exchange.outputs(backward=False) == []
    expected = Collectives(hardware(), HOSTS).all_reduce(size).item()
    assert exchange.gradient_sync_ms().item() == pytest.approx(expected)


def test_sizes_are_linear_in_loads_and_laws_never_fall() -> None:
    """The lower bound of `search.bound.relaxation` relies on it."""
    sizes = []

    class Spy(Exchange):
        def cost(self, law, size):  # type: ignore[no-untyped-def]
            sizes.append((law, size))
            return super().cost(law, size)

    weighted = a_table("w", weighted=True)
    for kind, kernel in (
        (T.TABLE_WISE, ComputeKernel.FUSED),
        (T.ROW_WISE, ComputeKernel.FUSED),
        (T.TABLE_ROW_WISE, ComputeKernel.FUSED),
        (T.DATA_PARALLEL, ComputeKernel.DENSE),
    ):
        workload = a_workload(weighted, qcomm=QComm("fp16", "fp32"))
        real = exchange_of(workload, HOSTS, kind, kernel)
        batch = PlanScorer(workload, HOSTS, device_bound())
        batch.group_index(0, sharded(workload, HOSTS, kind, kernel)[0])
        spy = Spy(batch.costs, batch.groups, [0], real.loads)
        for ask in (spy.permute_ms, spy.ids_ms, spy.recat_ms, spy.gradient_sync_ms):
            ask()
        spy.outputs(backward=False)
        spy.outputs(backward=True)
    generator = np.random.default_rng(0)
    assert len(sizes) > 20
    for law, size in sizes:
        a = np.repeat(generator.uniform(0, 1e9, (1, 1, COLUMNS)), 8, axis=1)
        b = np.repeat(generator.uniform(0, 1e9, (1, 1, COLUMNS)), 8, axis=1)
        assert size(3 * a + b) == pytest.approx(3 * size(a) + size(b))
        assert not size(np.zeros_like(a)).any()
        uneven = generator.uniform(0, 1e9, (1, 8, COLUMNS))
        level = np.repeat(uneven.mean(axis=1, keepdims=True), 8, axis=1)
        assert size(level).max() <= size(uneven).max() * (1 + 1e-12)
        times = law(np.concatenate(([0.0], np.geomspace(1, 1e12, 200))))
        assert (np.diff(times) >= -1e-12).all()


def test_exchanges_run_module_by_module() -> None:
    tables = (a_table("a", module="second"), a_table("b", module="first"), a_table("c"))
    workload = a_workload(*tables)
    batch = PlanScorer(workload, HOSTS, hardware())
    rw, tw = (sharded(workload, HOSTS, k) for k in (T.ROW_WISE, T.TABLE_WISE))
    for index in range(3):
        batch.number(index, rw[index])
        batch.number(index, tw[index])
    in_turn = exchanges(batch.costs, batch.groups, batch.totals(rw)[None])
    assert [e.name for e in in_turn] == [
        "second.TW", "second.RW", "first.TW", "first.RW", "ebc.TW", "ebc.RW",
    ]  # fmt: skip
    assert [e.active.item() for e in in_turn] == [False, True] * 3
