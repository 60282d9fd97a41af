"""Kernel time of single ops: what they are made of, by name and operands."""

from __future__ import annotations

from dataclasses import replace

import pytest

from predictor import units
from predictor.cost.elementwise import columns_ms, memory_ms
from predictor.cost.gemm import attention_ms, batched_ms, gemm_ms
from predictor.cost.ops.op_time import OpCost, OpTimes, fused_chains, outer_bytes
from predictor.hardware.loader import load_hardware
from predictor.model.op_calls import OpCall, Operand
from tests.builders import hardware
from tests.predictor.cost.ops.operands import tensor

PROFILES = ["h100-sxm", "cpu-gloo"]


def cost(
    name: str,
    inputs: list[Operand],
    *outputs: Operand,
    profile: str = "h100-sxm",
    product_type: str = "fp32",
    mutates: bool = False,
) -> OpCost:
    call = OpCall(name, tuple(inputs), outputs, mutates=mutates)
    return OpTimes(hardware(profile), product_type).cost(call)


def test_a_causal_mask_spares_the_keys_that_nobody_sees() -> None:
    hw = hardware("h100-sxm")

    def ms(name: str, queries: int, keys: int) -> float:
        q, k = tensor(1, 64, 8, queries, 64), tensor(2, 64, 8, keys, 64)
        return cost(f"_scaled_dot_product_{name}", [q, k, k], replace(q, storage=3)).ms

    def direct(queries: int, keys: int) -> float:
        shape = queries, keys, 64
        return attention_ms(hw, 64 * 8, shape, "fp32", backward=False, causal=True)

    assert ms("flash_attention_causal", 2048, 2048) == direct(2048, 2048)
    assert 0.4 < ms("flash_attention_causal", 2048, 2048) / ms("flash_attention", 2048, 2048) < 0.7
    # of fewer queries, flash kernels compute the last ones, others the first
    assert ms("flash_attention_causal", 1024, 2048) == direct(1024, 2048)
    assert ms("efficient_attention_causal", 1024, 2048) == direct(1024, 1024)
    assert ms("efficient_attention_causal", 2048, 512) == ms("efficient_attention", 2048, 512)


X, Y, OUT = tensor(1, 512, 256), tensor(2, 256, 128), tensor(3, 512, 128)


@pytest.mark.parametrize("profile", PROFILES)
def test_products(profile: str) -> None:
    hw = hardware(profile)
    plain = cost("mm", [X, Y], OUT, profile=profile)
    assert plain.ms == gemm_ms(hw, 512, 128, 256, "fp32")
    assert plain.product == (512, 128, 256)
    bias = 0.0 if hw.elementwise.fused_bias else float(memory_ms(hw, 2 * OUT.bytes))
    added = cost("addmm", [tensor(4, 128), X, Y], OUT, profile=profile)
    assert added.ms == pytest.approx(plain.ms + bias)
    # a view of the other order is as good
    turned = replace(Y, shape=(256, 128), strides=(1, 256))
    assert cost("mm", [X, turned], OUT, profile=profile).ms == plain.ms
    batch = [tensor(1, 8, 64, 32), tensor(2, 8, 32, 16)]
    op_cost = cost("bmm", batch, tensor(3, 8, 64, 16), profile=profile)
    assert op_cost.ms == batched_ms(hw, 8, 64, 16, 32, "fp32")
    weight = tensor(2, 128, 256)
    flat = cost("linear", [tensor(1, 4, 128, 256), weight], tensor(3, 4, 128, 128), profile=profile)
    assert flat.product == (512, 128, 256)


@pytest.mark.parametrize(
    ("name", "given", "made", "passes"),
    [
        ("add", 2, 1, 3),
        ("relu", 1, 1, 2),
        ("native_layer_norm_backward", 2, 1, 5),
        ("_softmax_backward_data", 2, 1, 3),
        ("clone", 1, 1, 2),
        ("zeros_like", 1, 1, 1),
        ("slice_backward", 1, 1, 3),
    ],
)
def test_passes_over_memory(name: str, given: int, made: int, passes: int) -> None:
    hw = hardware()
    inputs = [tensor(at, 1024, 1024) for at in range(given)]
    op_cost = cost(name, inputs, *(tensor(10 + at, 1024, 1024) for at in range(made)))
    floors = (op_cost.kernels - 1) * units.us(hw.elementwise.floor_us)
    assert op_cost.ms == pytest.approx(float(memory_ms(hw, passes * 4 * 2**20)) + floors)
    assert op_cost.modelled


def test_what_broadcasting_repeats_is_read_once() -> None:
    row = replace(tensor(2, 1024, 1024), strides=(0, 1), storage_bytes=4096)
    hw = hardware()
    # the kernel computes addresses one by one, which may outlast the bytes
    apart = units.us(hw.elementwise.floor_us + 1e-3 * hw.elementwise.strided_ns * 2**20)
    op_cost = cost("mul", [tensor(1, 1024, 1024), row], tensor(3, 1024, 1024))
    read_once = float(memory_ms(hw, 2 * 4 * 2**20 + 4096))
    assert op_cost.ms == pytest.approx(max(apart, read_once))


def test_an_operand_given_twice_is_read_once_and_one_written_in_place_twice_touched() -> None:
    x = tensor(1, 1024, 1024)
    twice = cost("mul", [x, x], tensor(2, 1024, 1024))
    place = cost("mul_", [x], x, mutates=True)
    assert twice.ms == place.ms == cost("relu", [x], tensor(2, 1024, 1024)).ms
    filled = cost("zero_", [x], x, mutates=True)
    assert filled.ms == pytest.approx(float(memory_ms(hardware(), x.bytes)))


@pytest.mark.parametrize("profile", PROFILES)
def test_gathers_touch_what_they_take_and_scatters_what_they_put(profile: str) -> None:
    hw = hardware(profile)
    table, ids = tensor(1, 10**6, 64), tensor(2, 1000, data_type="int64")
    rows = tensor(3, 1000, 64)
    gather = cost("embedding", [table, ids], rows, profile=profile)
    gathered = 1e-6 * hw.elementwise.gather_ns_per_element * 1000
    assert gather.ms == pytest.approx(float(memory_ms(hw, 2 * rows.bytes + ids.bytes)) + gathered)
    put = cost("index_add_", [table, ids, rows], table, profile=profile, mutates=True)
    assert put.ms == pytest.approx(float(memory_ms(hw, 3 * rows.bytes + ids.bytes)) + 2 * gathered)


def test_unknown_ops_say_so() -> None:
    assert not cost("fancy", [X], OUT).modelled
    assert cost("fancy", [X], OUT).ms > 0


SIZE = 4 * 64 * 64


def op(name: str, inputs: list[int], output: int, freed: tuple[int, ...] = ()) -> OpCall:
    return OpCall(name, tuple(tensor(i, 64, 64) for i in inputs), (tensor(output, 64, 64),), freed)


def test_what_lies_between_is_neither_read_nor_written() -> None:
    chain = [op("mul", [1, 2], 3), op("add", [3, 4], 5, (3,)), op("sigmoid", [5], 6)]
    # 5 is kept, for a backward
    assert outer_bytes(chain) == 3 * SIZE + 2 * SIZE
    assert outer_bytes(chain[:1]) == 3 * SIZE


def test_products_end_a_chain_and_views_are_left_out() -> None:
    x = tensor(2, 64, 64)
    view = OpCall("t", (x,), (x,))
    calls = [
        op("relu", [1], 2),
        view,
        op("mul", [2, 3], 4),
        op("mm", [4, 5], 6),
        op("add", [6, 7], 8),
    ]
    names = [[call.name for call in chain] for chain in fused_chains(calls)]
    assert names == [["relu", "mul"], ["mm"], ["add"]]


def test_a_compilers_kernel_of_one_op_loads_vectors_where_atens_does_not() -> None:
    hw = hardware("h100-sxm")
    sliced = replace(tensor(1, 64, 1024, 1024, data_type="bf16"), strides=(1 << 21, 1024, 1))
    call = OpCall("clone", (sliced,), (tensor(2, 64, 1024, 1024, data_type="bf16"),))
    times = OpTimes(hw, "fp32")
    assert times.cost(call).ms > 2 * times.cost_of_chain([call]).ms
    assert times.cost_of_chain([call]).ms == pytest.approx(float(columns_ms(hw, 4 << 26)))
    # compilers leave additions to places given by index to aten
    added = OpCall("index_put", (sliced, tensor(3, 1024)), (sliced,), mutates=True)
    assert times.cost(added) == times.cost_of_chain([added])


def test_chains_that_share_nothing_are_kernels_of_their_own() -> None:
    calls = [op("relu", [1], 2), op("relu", [3], 4), op("mul", [2, 5], 6)]
    assert sorted(len(chain) for chain in fused_chains(calls)) == [1, 2]


def test_a_foreach_kernel_takes_as_long_as_its_longest_block() -> None:
    """A model's few tensors are few blocks, whose number its bytes do not tell."""
    hw = load_hardware("h100-sxm")
    times = OpTimes(hw, "fp32")

    def step_us(elements: int) -> float:
        operands = tuple(
            Operand(i, 4 * elements, 0, (elements,), (1,), 4, "fp32") for i in range(2)
        )
        call = OpCall("_foreach_add_", operands, operands[:1], mutates=True)
        return 1e3 * times.cost(call).ms

    cost = hw.elementwise
    assert step_us(64) == pytest.approx(cost.floor_us, rel=0.05)
    assert step_us(2**16) == pytest.approx(cost.floor_us + cost.foreach_us, rel=0.1)
    assert 19 < step_us(2**19) < 25, "20 to 25 us in 24 steps of two H100s and an H200"
    assert step_us(2**23) - step_us(2**22) == pytest.approx(
        12 * 2**22 / hw.streaming * 1e3, rel=0.1
    )
