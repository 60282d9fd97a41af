"""Liveness of a rank's iteration against a naive oracle, and what recomputation saves."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.model.memory.iteration import ExchangeMemory, Iteration, exchanges
from predictor.model.op_calls import DenseProgram, Gradient, Lookup, LookupBackward, OpCall, Operand
from predictor.model.plan import ShardingType, TablePlan
from tests.builders import a_workload, cut, plan_of, table_wise
from tests.predictor.model.memory import one_table
from tests.predictor.model.memory.one_table import BATCH, IDS, LENGTHS, OUT, TOPOLOGY, WORLD


def tensor(storage: int, size: int) -> Operand:
    return Operand(storage, size, 0, (size,), (1,), 1)


def op(reads: list[Operand], makes: list[Operand], *freed: int) -> OpCall:
    return OpCall("op", tuple(reads), tuple(makes), freed)


def program(
    forward: list[OpCall | Lookup],
    backward: list[OpCall | LookupBackward | Gradient],
    optimizer: list[OpCall] | None = None,
    resident: tuple[Operand, ...] = (),
) -> DenseProgram:
    return DenseProgram(1, tuple(forward), tuple(backward), tuple(optimizer or ()), resident)


def peak(dense: DenseProgram, *exchanges: ExchangeMemory, pipeline: str = "base") -> int:
    workload = a_workload(train_pipeline=pipeline)
    return Iteration(workload, dense, exchanges, "cpu").run().allocated_bytes


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[OpCall], list[OpCall]]:
    """Ops that read what is there, make tensors, work in place and free in any order."""
    there: list[Operand] = [tensor(0, 100)]
    ops: list[OpCall] = []
    for number in range(1, draw(st.integers(1, 30))):
        reads = draw(st.lists(st.sampled_from(there), max_size=3, unique=True))
        in_place = bool(reads) and draw(st.booleans())
        output = reads[0] if in_place else tensor(number, draw(st.integers(1, 1000)))
        if not in_place:
            there.append(output)
        mortal = [t.storage for t in there if t.storage]
        freed = draw(st.lists(st.sampled_from(mortal), max_size=2, unique=True)) if mortal else []
        there = [t for t in there if t.storage not in freed]
        ops.append(op(reads, [output], *freed))
    cut = draw(st.integers(0, len(ops)))
    return ops[:cut], ops[cut:]


@given(programs())
@settings(max_examples=60)
def test_the_dense_peak_is_that_of_a_list_of_what_is_alive(
    parts: tuple[list[OpCall], list[OpCall]],
) -> None:
    forward, backward = parts
    alive: dict[int, int] = {}
    most = 0
    for call in (*forward, *backward):
        alive |= {t.storage: t.storage_bytes for t in call.outputs if t.storage}
        most = max(most, sum(alive.values()))
        for storage in call.freed:
            alive.pop(storage, None)
    assert peak(program(forward, list(backward), resident=(tensor(0, 100),))) == most


def test_an_activation_that_is_computed_again_is_not_there_in_between() -> None:
    x, wide, y, grad = tensor(0, 1), tensor(1, 1000), tensor(2, 10), tensor(3, 10)
    big = tensor(4, 1000)
    stored = program(
        [op([x], [wide]), op([wide], [y]), op([y], [big], 4)],
        [op([y], [grad], 2), op([grad, wide], [tensor(6, 1)], 1, 3)],
    )
    again = tensor(5, 1000)
    recomputed = program(
        [op([x], [wide]), op([wide], [y], 1), op([y], [big], 4)],
        [op([y], [grad], 2), op([x], [again]), op([grad, again], [tensor(6, 1)], 5, 3)],
    )
    assert peak(stored) == 2010
    assert peak(recomputed) == 1011


def test_a_gradient_goes_into_its_bucket_at_once() -> None:
    weight, grad, second_grad = tensor(0, 50), tensor(1, 50), tensor(2, 50)
    ops: list[OpCall | LookupBackward | Gradient] = [
        op([weight], [grad]),
        Gradient(50, 1),
        op([weight], [second_grad]),
        Gradient(50, 1),
    ]
    step = OpCall("_foreach_add_", (weight, grad, second_grad), (weight,), mutates=True)
    assert peak(program([], ops, [step], (weight,))) == 50


def test_ids_of_pipelines() -> None:
    """Ids of a table-wise exchange, block by block as TorchRec's pipelines keep them."""
    out = tensor(1, 10)
    grad = tensor(2, 10)
    dense = program(
        [Lookup("m", (out,)), op([out], [tensor(3, 1)], 1)],
        [op([tensor(3, 1)], [grad], 3), LookupBackward("m", (grad,))],
    )
    ids = ExchangeMemory("m", ShardingType.TABLE_WISE, True, sent=1000, received=2000, output=10)
    # sent, received, in order, and in order of the batch before
    assert peak(dense, ids) == 1000 + 2000 + 2000 + 2000
    # those that leave for the next batch, too
    assert peak(dense, ids, pipeline="sparse_dist") == 2 * 1000 + 2000 + 2000 + 2000
    ahead = peak(dense, ids, pipeline="prefetch_sparse_dist")
    assert ahead == 1000 + 2000 + 2 * 2000 + 1


def test_outputs_and_gradients_under_every_pipeline() -> None:
    """All-to-all: outputs, what is sent of them and what arrives; on the way back the gradient's
    slices, what leaves and what arrives (`All2All_Pooled_Req` and `_Wait` in comm_ops.py)."""
    out, grad = tensor(1, 100), tensor(2, 100)
    dense = program(
        [Lookup("m", (out,)), op([out], [], 1)], [op([], [grad]), LookupBackward("m", (grad,))]
    )
    e = ExchangeMemory("m", ShardingType.TABLE_WISE, True, looked_up=150, output=100)
    forward = 150 + 100 + 150
    backward = 100 + 100 + 100
    for pipeline in ("base", "sparse_dist", "prefetch_sparse_dist"):
        assert peak(dense, e, pipeline=pipeline) == max(forward, backward)
    wide = ExchangeMemory("m", ShardingType.TABLE_WISE, True, looked_up=10, output=100)
    assert peak(dense, wide) == 300


WORKLOAD = one_table.a_workload()
RECEIVED = IDS + LENGTHS


def exchanges_of(plan: TablePlan) -> list[list[ExchangeMemory]]:
    return exchanges(WORKLOAD, TOPOLOGY, plan_of(WORKLOAD, TOPOLOGY, [plan]))


def test_a_table_on_one_rank_gets_all_ids_and_looks_all_samples_up() -> None:
    (without,), (holder,) = exchanges_of(table_wise(WORKLOAD.tables[0], 1))
    assert (without.received, without.looked_up, without.ids) == (0, 0, 0)
    assert without.sent == holder.sent == RECEIVED
    assert without.output == holder.output == OUT
    assert holder.received == WORLD * RECEIVED
    assert holder.looked_up == WORLD * OUT


def test_row_shards_get_their_part_of_the_ids_and_write_every_sample() -> None:
    for (e,) in exchanges_of(cut(WORKLOAD.tables[0], ShardingType.ROW_WISE, [0, 1])):
        assert e.ids == 2 * BATCH
        assert e.received == 2 * BATCH * 8 + WORLD * BATCH * 8
        assert e.looked_up == WORLD * OUT
        assert e.sent == RECEIVED
