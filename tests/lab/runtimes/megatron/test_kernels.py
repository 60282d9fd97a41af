"""The kernels of a GPT's micro-batch under Megatron."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.runtimes.megatron import SEGMENTS, GptTraining, Kernel, segment_kernels
from predictor.errors import InputError

MODEL = GptTraining(
    hidden=1024, heads=16, layers=24, sequence=512, vocabulary=50257,
    micro_batch=4, global_batch=64, tensor=1, data=2, pipeline=2,
)  # fmt: skip


def flops(kernels: Iterable[Kernel]) -> float:
    return sum(2.0 * k.count * k.shape[0] * k.shape[1] * k.shape[2] for k in kernels)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"heads": 15}, "hidden size 1024 is not a multiple of 15"),
        ({"tensor": 32}, "attention heads 16"),
        ({"pipeline": 5}, "layers 24"),
        ({"micro_batch": 5}, "global batch 64 is not a multiple of 10"),
    ],
)
def test_what_does_not_divide_is_refused(changes: dict[str, int], text: str) -> None:
    with pytest.raises(InputError, match=text):
        replace(MODEL, **changes)  # type: ignore[arg-type]


def test_counts_of_an_iteration() -> None:
    assert MODEL.gpus == 4
    assert MODEL.micro_batches == 8
    assert MODEL.hidden_bytes == 2 * 4 * 512 * 1024
    assert replace(MODEL, tensor=4).layer_parameters == 3 * 1024**2


@given(
    tensor=st.sampled_from([1, 2, 4, 8, 16]),
    micro=st.sampled_from([1, 2, 4, 8]),
    sequence=st.sampled_from([256, 512, 1024]),
)
def test_a_layer_multiplies_as_often_as_the_literature_counts(
    tensor: int, micro: int, sequence: int
) -> None:
    """24 b s h^2 + 4 b s^2 h forward, twice that backward (Narayanan et al. 2021, appendix)."""
    model = replace(MODEL, tensor=tensor, micro_batch=micro, sequence=sequence)
    parts = segment_kernels(model)
    tokens, h = micro * sequence, model.hidden
    expected = (24 * tokens * h**2 + 4 * tokens * sequence * h) / tensor
    assert flops(parts["layer_forward"]) == pytest.approx(expected)
    assert flops(parts["layer_backward"]) == pytest.approx(2 * expected)
    head = 2 * tokens * h * model.local_vocabulary
    assert flops(parts["head_forward"]) == pytest.approx(head)
    assert flops(parts["head_backward"]) == pytest.approx(2 * head)


def test_recomputing_repeats_the_forward_pass_before_the_backward_pass() -> None:
    plain, again = segment_kernels(MODEL), segment_kernels(replace(MODEL, recompute=True))
    assert again["layer_backward"] == plain["layer_forward"] + plain["layer_backward"]
    assert all(again[name] == plain[name] for name in SEGMENTS if name != "layer_backward")


def test_tensor_parallel_ranks_reduce_twice_each_way() -> None:
    parts = segment_kernels(replace(MODEL, tensor=2))
    for name in ("layer_forward", "layer_backward"):
        reduced = [k for k in parts[name] if k.kind == "all_reduce"]
        assert [k.bytes_moved for k in reduced] == [MODEL.hidden_bytes] * 2
    assert not [k for k in segment_kernels(MODEL)["layer_forward"] if k.kind == "all_reduce"]


def test_the_fused_softmax_needs_a_multiple_of_four() -> None:
    """Two heads a GPU and one sample: PyTorch's own kernels run, in fp32."""
    few = segment_kernels(replace(MODEL, tensor=8, micro_batch=1))
    enough = segment_kernels(replace(MODEL, tensor=8, micro_batch=2))
    for name, more in (("layer_forward", 5), ("layer_backward", 6)):
        assert not [k for k in few[name] if k.kind == "softmax"]
        assert len([k for k in enough[name] if k.kind == "softmax"]) == 1
        assert len(few[name]) == len(enough[name]) + more
