"""Segments of the dense part: what they cost, where they are parted, what they wait for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from predictor.cost.dense import (
    OPTIMIZER_PASSES,
    Bucket,
    DenseWork,
    Execution,
    GradientReturn,
    LookupCall,
    Segment,
    TableUpdate,
    optimizer_ms,
    part_of,
    price,
)
from predictor.cost.elementwise import columns_ms, memory_ms
from predictor.cost.fixed_costs import FixedCosts
from predictor.cost.gemm import batched_ms, gemm_ms
from predictor.cost.ops.op_time import OpTimes
from predictor.hardware.schema import HardwareProfile
from predictor.model.op_calls import DenseProgram, Gradient, Lookup, LookupBackward, OpCall, Operand
from predictor.model.workload import DcnV2, DenseArch, Workload
from tests.builders import a_table, a_topology, a_workload, hardware

PROFILES = ["h100-sxm", "cpu-gloo"]
BATCH = 4096


def work(workload: Workload, profile: str | HardwareProfile = "h100-sxm") -> DenseWork:
    hw = hardware(profile) if isinstance(profile, str) else profile
    return FixedCosts(workload, a_topology(2), hw).dense


def a_model(interaction: str | DcnV2 = "concat", **more: object) -> Workload:
    dense = DenseArch(13, (512, 64), (512, 1), interaction)
    tables = [a_table(f"t{i}", dim=64) for i in range(8)]
    return a_workload(
        *tables,
        batch_size=BATCH,
        dense=replace(dense, **more),  # type: ignore[arg-type]
    )


def total(steps: tuple[object, ...]) -> float:
    return sum(step.cost_ms for step in steps if isinstance(step, Segment))


def passes(hw: HardwareProfile, *elements: float) -> float:
    return sum(float(memory_ms(hw, 4 * size)) for size in elements)


def linear(hw: HardwareProfile, width: int, out: int) -> float:
    """A layer and its bias, forward."""
    bias = 0.0 if hw.elementwise.fused_bias else passes(hw, 2 * BATCH * out)
    return gemm_ms(hw, BATCH, out, width, "fp32") + bias


@pytest.mark.parametrize("profile", PROFILES)
def test_the_bottom_mlp_is_its_products_and_passes(profile: str) -> None:
    hw, found = hardware(profile), work(a_model(), profile)
    first = found.forward.index(LookupCall("ebc"))
    forward = (
        linear(hw, 13, 512) + linear(hw, 512, 64) + passes(hw, 2 * BATCH * 512, 2 * BATCH * 64)
    )
    assert total(found.forward[:first]) == pytest.approx(forward)
    last = found.backward.index(TableUpdate("ebc"))
    # weight gradients of both layers, one input gradient, two bias sums, two ReLUs
    products = [(512, 13, BATCH), (64, 512, BATCH), (BATCH, 512, 64)]
    backward = sum(gemm_ms(hw, *shape, "fp32") for shape in products)
    backward += passes(hw, 3 * BATCH * 512, 3 * BATCH * 64, (BATCH + 1) * 512, (BATCH + 1) * 64)
    assert total(found.backward[last:]) == pytest.approx(backward)


@pytest.mark.parametrize("profile", PROFILES)
def test_dots_are_one_product_a_sample_and_their_pairs(profile: str) -> None:
    hw, pairs = hardware(profile), BATCH * 9 * 8 // 2
    dot, concat = (work(a_model(kind), profile) for kind in ("dot", "concat"))
    gather = float(memory_ms(hw, 4 * 2 * pairs + 8 * 2 * 36))
    gather += 1e-6 * hw.elementwise.gather_ns_per_element * pairs
    product = batched_ms(hw, BATCH, 9, 9, 64, "fp32")
    joined = float(columns_ms(hw, 2 * 4 * BATCH * (64 + 36)))
    tops = [linear(hw, width, 512) for width in (64 + 36, 9 * 64)]
    more = product + gather + joined + tops[0] - tops[1]
    assert total(dot.forward) - total(concat.forward) == pytest.approx(more)


@pytest.mark.parametrize("kind", ["dot", "concat", DcnV2(2, 64)], ids=str)
@pytest.mark.parametrize("profile", PROFILES)
def test_times_rise_with_the_batch_and_fall_with_faster_types(
    kind: str | DcnV2, profile: str
) -> None:
    def all_ms(workload: Workload) -> float:
        found = work(workload, profile)
        return total(found.forward) + total(found.backward)

    model = a_model(kind)
    big = model.with_batch_size(65536)
    assert all_ms(big) > all_ms(model)
    assert all_ms(replace(big, dense=replace(big.dense, data_type="bf16"))) < all_ms(big)


def test_what_reads_a_lookup_waits_for_it_once() -> None:
    tables = (a_table("a"), a_table("b", module="other"))
    found = work(a_workload(*tables))
    assert [step.module for step in found.forward if isinstance(step, LookupCall)] == [
        "ebc",
        "other",
    ]
    waits = [step.waits for step in found.forward if isinstance(step, Segment) and step.waits]
    assert waits == [("ebc", "other")], "only views lie between"
    kinds = [step for step in found.backward if isinstance(step, (GradientReturn, TableUpdate))]
    assert kinds == [
        GradientReturn("other"),
        GradientReturn("ebc"),
        TableUpdate("other"),
        TableUpdate("ebc"),
    ]


def an_operand(storage: int, *shape: int) -> Operand:
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    elements = 1
    for size in shape:
        elements *= size
    return Operand(storage, 4 * elements, 0, shape, tuple(strides), 4, "fp32")


def mm(a: Operand, b: Operand, out: int) -> OpCall:
    return OpCall("mm", (a, b), (an_operand(out, a.shape[0], b.shape[1]),))


def sequences() -> DenseProgram:
    """Lookups first, a layer that does not need them, one that does; the reverse backward."""
    ids, given, weight = an_operand(1, 512, 64), an_operand(2, 512, 64), an_operand(3, 64, 64)
    own, joined = an_operand(4, 512, 64), an_operand(6, 512, 64)
    grad = an_operand(7, 512, 64)
    forward = (
        Lookup("ec", (ids,)),
        mm(given, weight, 4),
        OpCall("mul", (own, ids), (joined,)),
    )
    backward = (
        OpCall("mul", (grad, own), (an_operand(8, 512, 64),)),
        LookupBackward("ec", (an_operand(8, 512, 64),)),
        mm(an_operand(9, 64, 512), grad, 10),
        Gradient(64 * 64),
    )
    return DenseProgram(512, forward, backward, ())


def at_once(cap: float = 25.0, ms: float = 0.0, **switches: bool) -> Execution:
    """A host that takes so long for an op."""
    return Execution(lambda kernels, views: ms, bucket_cap_mb=cap, **switches)


def priced(program: DenseProgram, modules: tuple[str, ...], cap: float = 25.0) -> DenseWork:
    return price(program, modules, OpTimes(hardware(), "fp32"), at_once(cap))


def test_lookups_called_first_are_updated_last() -> None:
    """What was recorded first runs last: gradients leave while the other layer's backward runs."""
    found = priced(sequences(), ("ec",))
    assert [type(step).__name__ for step in found.forward] == ["LookupCall", "Segment", "Segment"]
    assert [type(step).__name__ for step in found.backward] == [
        "Segment",
        "GradientReturn",
        "Segment",
        "TableUpdate",
        "Bucket",
    ]


def test_modules_that_the_program_does_not_call_come_first_and_return_last() -> None:
    found = priced(sequences(), ("ebc", "ec"))
    assert found.forward[0] == LookupCall("ebc")
    assert found.backward[-2:] == (GradientReturn("ebc"), TableUpdate("ebc"))


def test_buckets_are_sent_when_they_are_full() -> None:
    layers = tuple(
        event
        for at in range(6)
        for event in (mm(an_operand(1, 8, 8), an_operand(2, 8, 8), 10 + at), Gradient(2**18))
    )
    found = priced(DenseProgram(8, (), layers, ()), (), cap=2.0)
    assert [step for step in found.backward if isinstance(step, Bucket)] == [Bucket(2**21)] * 3
    assert [type(step).__name__ for step in found.backward] == ["Segment", "Bucket"] * 3
    assert found.parameters == 6


def test_a_slow_host_parts_a_segment_where_it_decides() -> None:
    """Small ops first, a long one last: the long one starts when the host has issued it."""
    small, long = (
        mm(an_operand(1, 8, 8), an_operand(2, 8, 8), 3),
        mm(an_operand(4, 8192, 4096), an_operand(5, 4096, 4096), 6),
    )
    program = DenseProgram(8, (*[small] * 20, long), (), ())
    times = OpTimes(hardware(), "fp32")
    found = price(program, (), times, at_once(ms=0.1))
    assert [step.kernels for step in found.forward if isinstance(step, Segment)] == [20, 1]
    quick = price(program, (), times, at_once())
    assert len(quick.forward) == 1


def test_ops_without_a_kernel_model_are_counted_by_bytes_and_listed() -> None:
    hw, x = hardware(), an_operand(1, 1000, 1000)
    strange = OpCall("fancy_op", (x,), (an_operand(2, 1000, 1000),))
    found = priced(DenseProgram(8, (strange, strange), (), ()), ())
    assert found.by_bytes == {"fancy_op": 2}
    assert total(found.forward) == pytest.approx(2 * float(memory_ms(hw, 8e6)))
    assert work(a_model("dot")).by_bytes == {}


@pytest.mark.parametrize("optimizer", OPTIMIZER_PASSES)
def test_a_step_of_tables_passes_over_parameters_and_state(optimizer: str) -> None:
    count = {"sgd": 3, "adagrad": 5, "adam": 7}[optimizer]
    expected = memory_ms(hardware(), count * 4e6)
    assert optimizer_ms(hardware(), optimizer, 1e6) == pytest.approx(expected)
    assert optimizer_ms(hardware(), optimizer, 0) == 0
    # a CPU keeps what lies between the ops of one parameter in its caches
    cpu, model = hardware("cpu-gloo"), a_model(optimizer=optimizer)
    found = work(model, cpu)
    size = count * sum(step.bytes for step in found.backward if isinstance(step, Bucket))
    assert found.optimizer.cost_ms == pytest.approx(float(memory_ms(cpu, size)))


def test_compiled_models_move_less_and_graphs_are_one_launch() -> None:
    plain = work(a_model(DcnV2(2, 64)))
    compiled = work(a_model(DcnV2(2, 64), compiled=True))
    graphs = work(a_model(DcnV2(2, 64), cuda_graphs=True))
    assert total(compiled.forward) < total(plain.forward)
    assert total(graphs.forward) == pytest.approx(total(plain.forward))

    def launches(of: DenseWork) -> int:
        return sum(step.kernels for step in of.backward if isinstance(step, Segment))

    segments = [step for step in graphs.backward if isinstance(step, Segment)]
    assert launches(graphs) == len(segments) < launches(compiled) < launches(plain)
    hosts = [
        sum(s.host_ms for s in of.backward if isinstance(s, Segment)) for of in (graphs, plain)
    ]
    assert hosts[0] < hosts[1] / 3


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("encoder.layers.0.self_attn.out_proj", "encoder.layers.0"),
        ("over._mlp.0._linear", "over"),
        ("towers.click.0._mlp.1", "towers.click.0"),
        ("history.attention.out_proj", "history.attention"),
        ("cross", "cross"),
        ("_inner.head", "_inner"),
    ],
)
def test_parts_of_a_model_are_named_as_people_speak_of_them(path: str, part: str) -> None:
    assert part_of(path) == part
