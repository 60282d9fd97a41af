"""What a traced job would take elsewhere: hand-made traces, and a public one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.workload import Table
from predictor.trace.events import CollectiveCall, DeviceEvent, HostEvent, RankTrace
from predictor.trace.read import load_traces
from predictor.trace.simulate.whatif import PlanSwap, gemm_calls, plan_swap, what_if
from tests.builders import a_table, a_topology, a_workload, device_bound, table_wise
from tests.predictor.trace.handmade import PAGEABLE, Recorder
from tests.public_data import TRACES, needs_public_data

V100 = "Tesla V100-SXM2-32GB"


def bound_by_its_device(device: str = V100, collective: CollectiveCall | None = None) -> RankTrace:
    """Steps of 1 s whose host waits for a kernel of 900 ms, or for a collective."""
    record = Recorder()
    for number in range(2):
        at = 1e6 * number
        record.step(at, at + 1e6)
        record.op("aten::mm", at + 10, at + 40)
        name = "volta_sgemm" if collective is None else "ncclKernel_AllReduce"
        record.launch((at + 20, at + 30), (at + 40, at + 9e5), name=name, collective=collective)
        record.op("aten::item", at + 50, at + 9.5e5)
        record.launch(
            (at + 60, at + 9e5 + 12),
            (at + 9e5 + 1, at + 9e5 + 2),
            name=PAGEABLE,
            runtime="cudaMemcpyAsync",
        )
    return record.trace(world_size=8, device=device)


def with_shapes(trace: RankTrace, *shapes: tuple[int, ...]) -> RankTrace:
    def shaped(event: HostEvent) -> HostEvent:
        if event.name != "aten::mm":
            return event
        return replace(event, shapes=shapes, dtypes=("float",) * len(shapes))

    return replace(trace, host=tuple(shaped(e) for e in trace.host))


def step_ms(trace: RankTrace, **changes: object) -> float:
    return what_if([trace], **changes).steps[0].predicted_ms  # type: ignore[arg-type]


def test_nothing_changed_is_the_replay() -> None:
    trace = bound_by_its_device()
    found = what_if([trace])
    assert found.steps[0].predicted_ms == pytest.approx(1000, rel=0.001)
    assert "100 % as traced" in found.notes[-1]


def test_a_kernel_without_shapes_scales_with_its_resource() -> None:
    old, new = load_hardware("v100-32gb"), load_hardware("h100-sxm")
    ratio = old.gemm.tflops["fp32"] / new.gemm.tflops["fp32"]
    found = what_if([bound_by_its_device()], hardware=new)
    assert found.steps[0].predicted_ms == pytest.approx(100 + 900 * ratio, rel=0.01)
    assert "by the ratio of a resource" in found.notes[-1]


def test_a_kernel_with_shapes_scales_with_its_model() -> None:
    trace = with_shapes(bound_by_its_device(), (8192, 8192), (8192, 8192))
    (call, _) = gemm_calls(trace)
    assert (call.count, call.m, call.n, call.k, call.data_type) == (1, 8192, 8192, 8192, "fp32")
    old, new = load_hardware("v100-32gb"), load_hardware("h100-sxm")
    ratio = call.predicted_ms(new) / call.predicted_ms(old)
    found = what_if([trace], hardware=new)
    assert found.steps[0].predicted_ms == pytest.approx(100 + 900 * ratio, rel=0.01)
    assert "by a model of both devices" in found.notes[-1]


def test_batch_scales_the_work_and_not_the_host() -> None:
    assert step_ms(bound_by_its_device(), batch_scale=2) == pytest.approx(1900, rel=0.01)
    assert step_ms(bound_by_its_device(), batch_scale=0.5) == pytest.approx(550, rel=0.01)


def test_links_scale_what_moves_and_batches_what_grows_with_them() -> None:
    gradients = bound_by_its_device(collective=CollectiveCall("all_reduce", 2**30, None, 0))
    assert step_ms(gradients, link_scale=0.5) == pytest.approx(1900, rel=0.01)
    assert step_ms(gradients, batch_scale=2) == pytest.approx(1000, rel=0.01)
    lookups = bound_by_its_device(collective=CollectiveCall("all_to_all", 2**30, None, 0))
    assert step_ms(lookups, batch_scale=2) == pytest.approx(1900, rel=0.01)
    unknown = bound_by_its_device(collective=CollectiveCall("other", None, None, 0))
    assert step_ms(unknown, link_scale=0.25) == pytest.approx(100 + 3600, rel=0.01)


def test_a_device_without_a_profile_is_said() -> None:
    trace = bound_by_its_device("Some GPU")
    with pytest.raises(InputError, match="Some GPU"):
        what_if([trace], hardware=load_hardware("h100-sxm"))
    assert step_ms(trace, batch_scale=2) == pytest.approx(1900, rel=0.01)


@needs_public_data
def test_a_host_bound_job_gains_little_from_a_faster_device() -> None:
    traces = load_traces([TRACES / "dlrm_kineto.tar.gz"]).traces
    found = what_if(traces, hardware=load_hardware("h100-sxm"))
    for step in found.steps:
        assert 0.9 < step.predicted_ms / step.measured_ms <= 1.001


TABLES = [a_table("large", 1_000_000, 128), a_table("small", 10_000, 32)]


def a_trace(rank: int = 0) -> RankTrace:
    return RankTrace("made up", rank, 2, "Some GPU", (), (), ())


def placed(*ranks: int) -> ShardingPlan:
    tables = {t.name: table_wise(t, r) for t, r in zip(TABLES, ranks, strict=True)}
    return ShardingPlan(tables, 2, 2)


def row_wise(table: Table) -> TablePlan:
    half = table.num_embeddings // 2
    shards = tuple(Shard(r, (r * half, 0), (half, table.embedding_dim)) for r in (0, 1))
    return TablePlan(ShardingType.ROW_WISE, ComputeKernel.FUSED, shards, table.module)


def swap(before: ShardingPlan, after: ShardingPlan, *ranks: int) -> PlanSwap:
    workload = a_workload(*TABLES, batch_size=8192)
    traces = [a_trace(rank) for rank in ranks or (0, 1)]
    return plan_swap(traces, workload, a_topology(2), device_bound(), before, after)


def kernel(name: str) -> DeviceEvent:
    return DeviceEvent(name, "kernel", 7, 0.0, 10.0)


def test_lookups_go_where_their_tables_go() -> None:
    found = swap(placed(0, 1), placed(1, 0))
    assert found.forward[0] < 1 < found.forward[1]
    assert found.forward[0] * found.forward[1] == pytest.approx(1.0)
    forward = kernel("split_embedding_codegen_forward_unweighted_kernel<float>")
    assert found.factor(0, forward) == found.forward[0]
    sort = kernel("cub::DeviceRadixSortOnesweepKernel")
    assert found.factor(1, sort) == found.backward[1]


def test_what_the_plan_does_not_touch_has_no_factor() -> None:
    found = swap(placed(0, 1), placed(1, 0))
    dense = "split_embedding_backward_codegen_dense_unweighted_kernel_warp_per_row_1"
    assert found.factor(0, kernel(dense)) is None
    assert found.factor(0, kernel("ampere_sgemm_128x64_tn")) is None
    reduced = DeviceEvent(
        "nccl", "kernel", 20, 0.0, 9.0, collective=CollectiveCall("all_reduce", 64, None, 0)
    )
    assert found.factor(0, reduced) is None


def test_ranks_without_lookups_and_new_collectives_are_named() -> None:
    found = swap(placed(0, 0), ShardingPlan({t.name: row_wise(t) for t in TABLES}, 2, 2))
    assert found.forward[1] is None
    text = " ".join(found.notes)
    assert "rank 1 ran no lookups" in text
    assert "row_wise was not used when traced" in text


def test_a_rank_that_no_plan_has_is_refused() -> None:
    with pytest.raises(InputError, match="rank 5, the plans have ranks 0 to 1"):
        swap(placed(0, 1), placed(1, 0), 5)


@pytest.mark.parametrize("scale", [0, -1, float("inf"), float("nan")])
def test_scales_above_nothing(scale: float) -> None:
    for name in ("batch_scale", "link_scale"):
        with pytest.raises(InputError, match=name):
            step_ms(bound_by_its_device(), **{name: scale})
