"""Segments of the dense part: what they cost, where they are parted, what they wait for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from predictor.cost.dense import (
    Bucket,
    DenseSegment,
    DenseWork,
    Execution,
    GradientReturn,
    LookupCall,
    TableUpdate,
    part_of,
    price,
)
from predictor.cost.fixed_costs import FixedCosts
from predictor.cost.ops.op_time import OpTimes
from predictor.hardware.schema import HardwareProfile
from predictor.model.op_calls import DenseProgram, Gradient, Lookup, LookupBackward, OpCall, Operand
from predictor.model.workload import DcnV2, DenseArch, Workload
from tests.builders import a_table, a_topology, a_workload, hardware
from tests.predictor.cost.ops.operands import tensor

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
    return sum(step.cost_ms for step in steps if isinstance(step, DenseSegment))


def test_what_reads_a_lookup_waits_for_it_once() -> None:
    tables = (a_table("a"), a_table("b", module="other"))
    dense = work(a_workload(*tables))
    assert [step.module for step in dense.forward if isinstance(step, LookupCall)] == [
        "ebc",
        "other",
    ]
    waits = [step.waits for step in dense.forward if isinstance(step, DenseSegment) and step.waits]
    assert waits == [("ebc", "other")], "only views lie between"
    kinds = [step for step in dense.backward if isinstance(step, (GradientReturn, TableUpdate))]
    assert kinds == [
        GradientReturn("other"),
        GradientReturn("ebc"),
        TableUpdate("other"),
        TableUpdate("ebc"),
    ]


def mm(a: Operand, b: Operand, out: int) -> OpCall:
    return OpCall("mm", (a, b), (tensor(out, a.shape[0], b.shape[1]),))


def sequences() -> DenseProgram:
    """Lookups first, a layer that does not need them, one that does; the reverse backward."""
    ids, gradient, weight = tensor(1, 512, 64), tensor(2, 512, 64), tensor(3, 64, 64)
    own, joined = tensor(4, 512, 64), tensor(6, 512, 64)
    grad = tensor(7, 512, 64)
    forward = (Lookup("ec", (ids,)), mm(gradient, weight, 4), OpCall("mul", (own, ids), (joined,)))
    backward = (
        OpCall("mul", (grad, own), (tensor(8, 512, 64),)),
        LookupBackward("ec", (tensor(8, 512, 64),)),
        mm(tensor(9, 64, 512), grad, 10),
        Gradient(64 * 64),
    )
    return DenseProgram(512, forward, backward, ())


def at_once(cap: float = 25.0, ms: float = 0.0, **switches: bool) -> Execution:
    """A host that takes so long for an op."""
    return Execution(lambda kernels, views, casts: ms, bucket_cap_mb=cap, **switches)


def priced(program: DenseProgram, modules: tuple[str, ...], cap: float = 25.0) -> DenseWork:
    return price(program, modules, OpTimes(hardware(), "fp32"), at_once(cap))


def test_lookups_called_first_are_updated_last() -> None:
    """The latest record runs first: gradients leave while the other layer's backward runs."""
    dense = priced(sequences(), ("ec",))
    assert [type(step).__name__ for step in dense.forward] == [
        "LookupCall",
        "DenseSegment",
        "DenseSegment",
    ]
    assert [type(step).__name__ for step in dense.backward] == [
        "DenseSegment",
        "GradientReturn",
        "DenseSegment",
        "TableUpdate",
        "Bucket",
    ]


def test_modules_that_the_program_does_not_call_come_first_and_return_last() -> None:
    dense = priced(sequences(), ("ebc", "ec"))
    assert dense.forward[0] == LookupCall("ebc")
    assert dense.backward[-2:] == (GradientReturn("ebc"), TableUpdate("ebc"))


def test_buckets_are_sent_when_they_are_full() -> None:
    layers = tuple(
        event
        for at in range(6)
        for event in (mm(tensor(1, 8, 8), tensor(2, 8, 8), 10 + at), Gradient(2**18))
    )
    dense = priced(DenseProgram(8, (), layers, ()), (), cap=2.0)
    assert [step for step in dense.backward if isinstance(step, Bucket)] == [Bucket(2**21)] * 3
    assert [type(step).__name__ for step in dense.backward] == ["DenseSegment", "Bucket"] * 3
    assert dense.parameters == 6


def test_a_slow_host_parts_a_segment_where_it_decides() -> None:
    """Small ops first, a long one last: the long one starts when the host has issued it."""
    small, long = (
        mm(tensor(1, 8, 8), tensor(2, 8, 8), 3),
        mm(tensor(4, 8192, 4096), tensor(5, 4096, 4096), 6),
    )
    program = DenseProgram(8, (*[small] * 20, long), (), ())
    times = OpTimes(hardware(), "fp32")
    dense = price(program, (), times, at_once(ms=0.1))
    assert [step.kernels for step in dense.forward if isinstance(step, DenseSegment)] == [20, 1]
    quick = price(program, (), times, at_once())
    assert len(quick.forward) == 1


def test_compiled_models_move_less_and_graphs_are_one_launch() -> None:
    plain = work(a_model(DcnV2(2, 64)))
    compiled = work(a_model(DcnV2(2, 64), compiled=True))
    graphs = work(a_model(DcnV2(2, 64), cuda_graphs=True))
    assert total(compiled.forward) < total(plain.forward)
    assert total(graphs.forward) == pytest.approx(total(plain.forward))

    def launches(dense: DenseWork) -> int:
        return sum(step.kernels for step in dense.backward if isinstance(step, DenseSegment))

    segments = [step for step in graphs.backward if isinstance(step, DenseSegment)]
    assert launches(graphs) == len(segments) < launches(compiled) < launches(plain)
    hosts = [
        sum(s.host_ms for s in dense_work.backward if isinstance(s, DenseSegment))
        for dense_work in (graphs, plain)
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
