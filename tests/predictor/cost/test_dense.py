"""Layers of the dense part: shapes, parameters, and what their times follow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from predictor.cost.dense import OPTIMIZER_PASSES, DenseLayers
from predictor.cost.elementwise import memory_ms
from predictor.cost.gemm import batched_ms, gemm_ms
from predictor.model.memory import dense_parameters
from predictor.model.workload import DcnV2, DenseArch, Workload
from tests.builders import a_table, a_workload, hardware

KINDS = ["dot", "concat", DcnV2(3, 512)]


def a_model(interaction: str | DcnV2 = "dot", **more: object) -> Workload:
    arch = DenseArch(13, (512, 256, 64), (1024, 512, 1), interaction)
    tables = [a_table(f"t{i}", dim=64) for i in range(26)]
    dense = replace(arch, **more)  # type: ignore[arg-type]
    return a_workload(*tables, batch_size=4096, dense=dense)


def layers(workload: Workload) -> DenseLayers:
    return DenseLayers(workload, hardware())


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_parameters_are_those_that_memory_reserves(kind: str | DcnV2) -> None:
    dense = layers(a_model(kind))
    every = [*dense.bottom, *dense.interaction, *dense.top]
    assert sum(layer.parameters for layer in every) == dense_parameters(a_model(kind))


def test_widths_of_the_interactions() -> None:
    assert layers(a_model("dot")).top_input == 64 + 27 * 26 // 2
    assert layers(a_model("concat")).top_input == 64 + 26 * 64
    cross = layers(a_model(DcnV2(3, 512)))
    assert cross.top_input == 27 * 64
    assert len(cross.interaction) == 3
    assert layers(a_model("concat")).interaction == []


def test_a_linear_layer_is_its_gemms_and_passes() -> None:
    dense, hw = layers(a_model()), hardware()
    last = dense.top[-1]
    assert last.forward_ms == pytest.approx(gemm_ms(hw, 4096, 1, 512, "fp32"))
    backward = gemm_ms(hw, 1, 512, 4096, "fp32") + gemm_ms(hw, 4096, 512, 1, "fp32")
    assert last.backward_ms == pytest.approx(backward + memory_ms(hw, 4096 * 4).item())
    assert last.parameters == 513
    # the input batch needs no gradient
    first, again = dense.bottom[0], DenseLayers(a_model(in_features=512), hardware()).bottom[0]
    assert (first.backward_kernels, dense.bottom[1].backward_kernels) == (3, 4)
    assert again.backward_kernels == 3


def test_a_bias_that_is_not_fused_is_copied_to_the_output() -> None:
    hw = hardware("cpu-gloo")
    assert not hw.elementwise.fused_bias
    moves = hw.elementwise.model_copy(update={"fused_bias": True})
    fused = DenseLayers(a_model(), hw.model_copy(update={"elementwise": moves}))
    apart = DenseLayers(a_model(), hw)
    copy_ms = memory_ms(hw, 2 * 4096 * 512 * 4).item()
    one, other = fused.top[1], apart.top[1]
    assert one.forward_ms == pytest.approx(gemm_ms(hw, 4096, 512, 1024, "fp32") + relu_ms(512))
    assert other.forward_ms == pytest.approx(one.forward_ms + copy_ms)
    assert other.backward_ms == one.backward_ms


def relu_ms(width: int) -> float:
    return memory_ms(hardware("cpu-gloo"), 2 * 4096 * width * 4).item()


@pytest.mark.parametrize("profile", ["h100-sxm", "cpu-gloo"])
def test_dot_products_are_one_product_a_sample_and_their_pairs(profile: str) -> None:
    hw, pairs = hardware(profile), 4096 * 27 * 26 / 2
    (dot,) = DenseLayers(a_model("dot"), hw).interaction
    gather = memory_ms(hw, 2 * pairs * 4).item()
    gather += 1e-6 * hw.elementwise.gather_ns_per_element * pairs
    forward, backward = (batched_ms(hw, 4096, 27, n, k, "fp32") for n, k in ((27, 64), (64, 27)))
    assert dot.forward_ms == pytest.approx(forward + gather)
    # two gradients of the stacked vectors are written, then added
    added = memory_ms(hw, 5 * 4096 * 27 * 64 * 4).item()
    assert dot.backward_ms == pytest.approx(2 * backward + 2 * gather + added)


def test_picking_pairs_takes_longer_an_element() -> None:
    hw, pairs = hardware("cpu-gloo"), 4096 * 27 * 26 / 2
    moves = hw.elementwise.model_copy(update={"gather_ns_per_element": 0.0})
    quick = hw.model_copy(update={"elementwise": moves})
    (slow,), (fast,) = (DenseLayers(a_model("dot"), h).interaction for h in (hw, quick))
    added = 1e-6 * hw.elementwise.gather_ns_per_element * pairs
    assert added > 0
    assert slow.forward_ms - fast.forward_ms == pytest.approx(added)
    assert slow.backward_ms - fast.backward_ms == pytest.approx(2 * added)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_times_rise_with_the_batch_and_fall_with_faster_types(kind: str | DcnV2) -> None:
    def total(workload: Workload) -> float:
        dense = layers(workload)
        every = [*dense.bottom, *dense.interaction, *dense.top, dense.loss]
        return sum(layer.forward_ms + layer.backward_ms for layer in every)

    model = a_model(kind)
    assert total(model.with_batch_size(65536)) > total(model)
    big = model.with_batch_size(65536)
    assert total(replace(big, dense=replace(big.dense, data_type="bf16"))) < total(big)


@pytest.mark.parametrize("optimizer", OPTIMIZER_PASSES)
def test_an_optimizer_step_passes_over_parameters_and_state(optimizer: str) -> None:
    dense = layers(a_model(optimizer=optimizer))
    passes = {"sgd": 3, "adagrad": 5, "adam": 7}[optimizer]
    assert dense.optimizer_ms(1e6) == pytest.approx(memory_ms(hardware(), passes * 4e6))
    assert dense.optimizer_ms(0) == 0


def test_sequences_are_as_wide_as_their_ids() -> None:
    table = a_table("s", dim=32, pooling="none")
    assert layers(a_workload(table, a_table("p"))).sequence_width == 2.0 * 32
    assert layers(a_workload(a_table("p"))).sequence_width == 0


def test_layers_of_unknown_wiring_run_behind_the_lookups() -> None:
    known = a_workload(dense=DenseArch(13, (64, 32), (64, 1), "concat"))
    loose = a_workload(dense=DenseArch(1, (), (), "concat", linears=((13, 64), (64, 32))))
    layers = DenseLayers(loose, hardware())
    assert layers.bottom == []
    assert [(layer.name, layer.parameters) for layer in layers.top] == [
        ("linear.0", 14 * 64),
        ("linear.1", 65 * 32),
    ]
    assert layers.top[0].forward_ms == DenseLayers(known, hardware()).bottom[0].forward_ms
