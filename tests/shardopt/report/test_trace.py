"""How the tables of ``shardopt trace`` are laid out."""

import pytest

from shardopt.report.trace import in_one_line

NAMES = [
    f"sm80_xmma_{way}_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw_tilesize{tile}"
    f"_stage3_warpsize4x2x1_g1_tensor16x8x8_execute{split}_kernel_cudnn_infer"
    for way in ("fprop", "wgrad")
    for tile in ("256x64x32", "128x128x16")
    for split in ("", "_split_k")
]


@pytest.mark.parametrize("width", [24, 50, 66, 100, 200])
def test_long_names_of_kernels_take_a_line_each_and_stay_apart(width: int) -> None:
    names = [*NAMES, "volta_sgemm_64x64_nn"]
    cut = in_one_line(names, width)
    assert all(len(name) <= width for name in cut)
    assert cut[-1] == names[-1]
    if width >= 50:
        assert all(name.startswith("sm80_xmma_") for name in cut[:-1])
        assert len({*cut}) == len(names)


def test_a_long_name_alone_keeps_its_beginning() -> None:
    assert in_one_line(["a" * 60], 20) == ["a" * 19 + "…"]
    assert in_one_line([], 20) == []
