"""Tiles and waves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.cost.gemm import DATA_BYTES, batched_ms, gemm_ms, gemm_times
from predictor.errors import ProfileError
from predictor.hardware.loader import list_hardware, load_hardware

sizes = st.integers(1, 20_000)


@given(
    st.sampled_from(list_hardware()),
    sizes,
    sizes,
    sizes,
    st.sampled_from(["fp32", "tf32", "fp16", "bf16"]),
    st.floats(1, 3),
)
@settings(max_examples=200, deadline=None)
def test_never_falls_with_any_size(
    name: str, m: int, n: int, k: int, dtype: str, factor: float
) -> None:
    """But where rows become a multiple of 16 bytes (the next test)."""
    hw = load_hardware(name)
    base = gemm_ms(hw, m, n, k, dtype)
    assert base > 0
    for shape in ((int(m * factor), n, k), (m, int(n * factor), k), (m, n, int(k * factor))):
        if aligned((m, n, k), dtype) or not aligned(shape, dtype):
            assert gemm_ms(hw, *shape, dtype) >= base * (1 - 1e-12)


def aligned(shape: tuple[int, int, int], dtype: str) -> bool:
    """Rows of the result and of the first operand are a multiple of 16 bytes."""
    return not any(side * DATA_BYTES[dtype] % 16 for side in shape[1:])


def test_rows_that_bulk_copies_cannot_load_take_longer_on_b200() -> None:
    hw = load_hardware("b200")
    aligned_ms = gemm_ms(hw, 8192, 4096, 4096, "bf16")
    for shape in ((8192, 4095, 4096), (8192, 4096, 4095)):
        assert gemm_ms(hw, *shape, "bf16") > 5 * aligned_ms
    assert gemm_ms(hw, 8191, 4096, 4096, "bf16") <= aligned_ms, "m is no row"


@pytest.mark.parametrize("name", list_hardware())
def test_never_faster_than_the_achieved_peak_or_memory(name: str) -> None:
    hw = load_hardware(name)
    for m, n, k in ((8192, 8192, 8192), (8192, 512, 256), (65536, 1, 1024), (1, 1, 1)):
        time = gemm_ms(hw, m, n, k, "fp32")
        assert time >= 2.0 * m * n * k / (hw.gemm.tflops["fp32"] * 1e9)
        assert time >= 4.0 * (m * k + k * n + m * n) / hw.memory.hbm


def test_one_tile_more_starts_another_wave() -> None:
    hw = load_hardware("a100-40gb")
    one_tile = hw.gemm.model_copy(update={"tiles": ((128, 128),), "split_k": 1, "floor_us": 0.0})
    full = gemm_times(one_tile, 108, hw.memory.hbm, (128 * 108, 128, 4096), "fp32")
    over = gemm_times(one_tile, 108, hw.memory.hbm, (128 * 108 + 1, 128, 4096), "fp32")
    assert float(over) == pytest.approx(2 * float(full))


def test_unknown_type_lists_known_ones() -> None:
    with pytest.raises(ProfileError, match=r"gemm.tflops for int8.*fp32"):
        gemm_ms(load_hardware("h100-sxm"), 1, 1, 1, "int8")


@pytest.mark.parametrize("dtype", ["tf32", "bf16", "fp8"])
@given(st.integers(1, 64), sizes, sizes, sizes)
@settings(max_examples=50, deadline=None)
def test_a_batch_on_tensor_cores_costs_at_most_its_products_one_by_one(
    dtype: str, count: int, m: int, n: int, k: int
) -> None:
    hw = load_hardware("b200")
    single_ms = gemm_ms(hw, m, n, k, dtype)
    assert (
        single_ms * (1 - 1e-12)
        <= batched_ms(hw, count, m, n, k, dtype)
        <= count * single_ms * (1 + 1e-12)
    )


@pytest.mark.parametrize("name", ["h100-sxm", "h100-pcie", "b200", "gb300"])
def test_tensor_cores_are_bound_by_rate_operands_and_memory(name: str) -> None:
    hw = load_hardware(name)
    for dtype, cores in hw.gemm.tensor_cores.items():
        ideal = 2.0 * 8192**3 / (hw.gemm.tflops[dtype] * 1e9)
        assert ideal <= gemm_ms(hw, 8192, 8192, 8192, dtype) <= 1.35 * ideal
        assert gemm_ms(hw, 1, 1, 1, dtype) == pytest.approx(1e-3 * cores.floor_us, rel=0.5)
        # a thin product reads its long operand
        assert gemm_ms(hw, 65536, 1, 4096, dtype) >= 65536 * 4096 / hw.memory.hbm


def test_a_long_k_with_few_tiles_is_split() -> None:
    hw = load_hardware("h100-sxm")
    cores = hw.gemm.tensor_cores["bf16"].model_copy(update={"split_k": 1})
    group = hw.gemm.model_copy(update={"tensor_cores": {"bf16": cores}})
    shape = (256, 256, 65536)
    unsplit = float(gemm_times(group, hw.sms, hw.memory.hbm, shape, "bf16"))
    assert gemm_ms(hw, *shape, "bf16") < 0.5 * unsplit
