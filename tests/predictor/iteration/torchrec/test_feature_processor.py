"""Feature processors: their work in an iteration, and the way of their positions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from predictor.cost.ops.position_weights import (
    OPS,
    PREPARE_BYTES,
    RANGE_BYTES,
    READ_BACK_BYTES,
    RETURN_BYTES,
    WEIGH_BYTES,
)
from predictor.iteration.graph import Graph
from predictor.iteration.plan_scorer import PlanScorer
from predictor.iteration.timeline import simulate
from predictor.model.dlrm_program import dense_program
from predictor.model.memory.iteration import POSITION_BYTES, exchanges
from predictor.model.memory.peak import PeakMemory
from predictor.model.op_calls import Gradient
from predictor.model.plan import ShardingType
from predictor.model.workload import Feature, Workload
from predictor.units import us
from tests.builders import a_table, a_topology, a_workload, device_bound, hardware, plan_of, sharded

POSITIONS, IDS, TOPOLOGY = 100, 20.0, a_topology(2)
WHOLE, ROWS = ShardingType.TABLE_WISE, ShardingType.ROW_WISE


def workload(positions: int = POSITIONS, *, weighted: bool = True) -> Workload:
    features = [Feature(f"f{at}", IDS, position_weights=positions) for at in range(2)]
    return a_workload(*(a_table(f.name, weighted=weighted, features=(f,)) for f in features))


def graph(model: Workload, *kinds: ShardingType) -> Graph:
    batch = PlanScorer(model, TOPOLOGY, device_bound())
    plans = [sharded(model, TOPOLOGY, kind)[at] for at, kind in enumerate(kinds)]
    return batch.graph(batch.totals(plans)[None])


def costs(model: Workload, *kinds: ShardingType) -> dict[str, float]:
    return {op.name: float(op.cost_ms.max()) for op in graph(model, *kinds).ops}


def test_positions_travel_where_a_table_of_the_module_is_split() -> None:
    weighed, plain = workload(0), workload(0, weighted=False)
    for kinds, sent in (((WHOLE, WHOLE), plain), ((ROWS, ROWS), weighed), ((WHOLE, ROWS), weighed)):
        weighted, like = costs(workload(), *kinds), costs(sent, *kinds)
        moves = [name for name in like if name.endswith("ids all-to-all")]
        assert moves
        assert [weighted[name] for name in moves] == [like[name] for name in moves]
        permutes = [name for name in like if name.endswith("permute ids")]
        more = sum(weighted[name] - like[name] for name in permutes)
        ids = IDS * 1024 * 2 * (ROWS in kinds)
        assert more == pytest.approx(PREPARE_BYTES * ids / hardware().streaming)


@pytest.mark.parametrize("kind", [WHOLE, ROWS])
def test_weights_are_gathered_by_feature_and_their_gradients_scattered(kind: ShardingType) -> None:
    op_costs = costs(workload(), kind, kind)
    hw, floor = hardware(), us(hardware().elementwise.floor_us)
    ids = IDS * 1024 * 2 * (2 if kind is WHOLE else 1)  # both tables lie on the first rank
    forward = (READ_BACK_BYTES if kind is ROWS else RANGE_BYTES) + WEIGH_BYTES
    for way, each, backward in (("", forward, False), (" backward", RETURN_BYTES, True)):
        name = f"ebc.{kind.short} position weights{way}"
        a_rank, a_feature = OPS[backward]
        expected = each * ids / hw.streaming + (a_rank + a_feature * 2) * floor
        assert op_costs[name] == pytest.approx(expected, rel=1e-6)


def test_plans_with_and_without_split_rows_are_scored_together_as_one_by_one() -> None:
    model = workload()
    batch = PlanScorer(model, TOPOLOGY, hardware())
    table_wise, rows = (sharded(model, TOPOLOGY, kind) for kind in (WHOLE, ROWS))
    plans = [table_wise, rows, (table_wise[0], rows[1])]
    one_by_one = [simulate(batch.graph(batch.totals(plan)[None])).iteration_ms for plan in plans]
    assert batch.score(plans) == pytest.approx(np.concatenate(one_by_one))


def test_parameters_are_those_of_the_dense_optimizer() -> None:
    bare, processed = dense_program(workload(0)), dense_program(workload())
    assert processed.backward[len(bare.backward) :] == (Gradient(POSITIONS), Gradient(POSITIONS))
    assert processed.gradient_bytes - bare.gradient_bytes == 4 * 2 * POSITIONS
    more = [operand.bytes for operand in processed.resident[len(bare.resident) :]]
    assert more == [4 * POSITIONS] * 2
    assert len(processed.optimizer) == len(bare.optimizer) + 1
    adam = replace(workload(), dense=replace(workload().dlrm, optimizer="adam"))
    states = dense_program(adam).state_bytes - dense_program(workload(0)).state_bytes
    assert states >= 2 * 4 * 2 * POSITIONS


@pytest.mark.parametrize("kind", [WHOLE, ROWS])
def test_positions_and_weights_stay_until_the_backward(kind: ShardingType) -> None:
    model = workload()
    plan = plan_of(model, TOPOLOGY, sharded(model, TOPOLOGY, kind))
    (exchange,) = exchanges(model, TOPOLOGY, plan)[0]
    (weighed,) = exchanges(workload(0), TOPOLOGY, plan)[0]
    ids = IDS * 1024 * 2 * (2 if kind is WHOLE else 1)
    assert exchange.positions == POSITION_BYTES * ids
    assert weighed.received - exchange.received == (4 * ids if kind is WHOLE else 0)
    with_it, without = (
        PeakMemory(w, TOPOLOGY).peaks(plan)[0].allocated_bytes for w in (model, workload(0))
    )
    assert with_it > without
