"""The ops of a DLRM: which there are, in which order, and what they keep in memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from lab.planners.reservation import dense_parameters
from predictor.model.dlrm_program import dense_program
from predictor.model.op_calls import DenseProgram, Lookup, LookupBackward, OpCall
from predictor.model.workload import DcnV2, DenseArch, Workload
from tests.builders import a_table, a_workload

KINDS = ["dot", "concat", DcnV2(3, 512)]


def a_model(interaction: str | DcnV2 = "dot", **more: object) -> Workload:
    arch = DenseArch(13, (512, 256, 64), (1024, 512, 1), interaction)
    tables = [a_table(f"t{i}", dim=64) for i in range(26)]
    dense = replace(arch, **more)  # type: ignore[arg-type]
    return a_workload(*tables, batch_size=4096, dense=dense)


def ops(program: DenseProgram, part: str = "forward") -> list[OpCall]:
    return [event for event in getattr(program, part) if isinstance(event, OpCall)]


def names(program: DenseProgram, part: str = "forward") -> list[str]:
    return [op.name for op in ops(program, part) if op.moves]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("data_type", ["fp32", "bf16"])
def test_parameters_are_those_that_memory_reserves(kind: str | DcnV2, data_type: str) -> None:
    workload = a_model(kind, data_type=data_type, optimizer="adam")
    program = dense_program(workload)
    count = dense_parameters(workload)
    assert program.gradient_bytes == 4 * count
    assert program.state_bytes == 2 * 4 * count
    assert sum(operand.storage_bytes for operand in program.resident) == 4 * count


def test_a_layer_is_a_product_and_what_follows_it() -> None:
    program = dense_program(a_model("concat"))
    assert names(program) == [
        *["addmm", "relu"] * 3,
        "cat",
        *["addmm", "relu"] * 2,
        "addmm",
        "binary_cross_entropy_with_logits",
    ]
    backward = Counter(names(program, "backward"))
    # two products a layer, and one for the first, whose input needs no gradient
    assert (backward["mm"], backward["sum"], backward["threshold_backward"]) == (11, 6, 5)


def test_lookups_stand_between_the_bottom_and_what_reads_them() -> None:
    tables = (
        a_table("a"),
        a_table("b", module="other"),
        a_table("s", module="seq", pooling="none"),
    )
    program = dense_program(a_workload(*tables))
    kinds = [type(event).__name__ for event in program.forward]
    first = kinds.index("Lookup")
    assert names(replace(program, forward=program.forward[:first])) == ["addmm", "relu"] * 2
    lookups = [event for event in program.forward if isinstance(event, Lookup)]
    assert [lookup.module for lookup in lookups] == ["ebc", "other", "seq"]
    assert [lookup.outputs[0].shape for lookup in lookups] == [(1024, 64), (1024, 64), (2048, 64)]
    back = [event for event in program.backward if isinstance(event, LookupBackward)]
    assert [event.module for event in back] == ["seq", "other", "ebc"]
    for lookup, event in zip(lookups, reversed(back), strict=True):
        shapes = [operand.shape for operand in lookup.outputs]
        assert shapes == [operand.shape for operand in event.gradients]


def test_parameters_of_half_precision_are_cast_there_and_back() -> None:
    program = dense_program(a_model("concat", data_type="bf16"))
    products = [op for op in ops(program) if op.name == "addmm"]
    assert {operand.data_type for op in products for operand in op.inputs} == {"bf16"}
    assert Counter(names(program, "backward"))["_to_copy"] == 12 + 1  # and the logits' gradient
    assert {operand.data_type for operand in program.resident} == {"fp32"}


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("data_type", ["fp32", "bf16"])
def test_memory_is_given_back_once_and_not_used_again(kind: str | DcnV2, data_type: str) -> None:
    program = dense_program(a_model(kind, data_type=data_type, optimizer="adagrad"))
    freed: set[int] = set()
    for op in (*ops(program), *ops(program, "backward"), *ops(program, "optimizer")):
        used = {operand.storage for operand in (*op.inputs, *op.outputs)}
        assert not used & freed, op.name
        assert not freed & set(op.freed)
        freed |= set(op.freed)
    assert not freed & {operand.storage for operand in program.resident}
    assert len(freed) > 40


@pytest.mark.parametrize(
    ("optimizer", "passes"), [("sgd", 3), ("adagrad", 3 + 2 + 2 + 2 + 4), ("adam", 18)]
)
def test_a_step_is_that_of_the_foreach_optimizers(optimizer: str, passes: int) -> None:
    program = dense_program(a_model("concat", optimizer=optimizer))
    size = program.gradient_bytes
    moved = 0
    for op in ops(program, "optimizer"):
        read = {operand.storage: operand.bytes for operand in op.inputs}
        moved += sum(read.values()) + sum(operand.bytes for operand in op.outputs)
    assert moved == passes * size
