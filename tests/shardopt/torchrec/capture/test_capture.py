"""Captured programs; their FLOP against PyTorch's own counter on real tensors."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from predictor.model.dense_program import DenseProgram
from predictor.model.op_calls import OpCall
from shardopt.torchrec.module.dense_part import capture_dense
from tests.shardopt.torchrec.capture.modules import (
    Attention,
    Convolutions,
    Einsum,
    Encoder,
    Mlp,
)
from tests.shardopt.torchrec.capture.sizes import AtBatch

BATCH = 64
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (Mlp, (24,)),
    "encoder": (Encoder, (10, 32)),
    "recomputed": (lambda: Encoder(recompute=True), (10, 32)),
    "convolutions": (Convolutions, (3, 16, 16)),
    "attention": (Attention, (12, 32)),
    "einsum": (Einsum, (6, 16)),
}
# the counter knows attention on GPUs alone; on CPUs the op has another name
CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (
        lambda q, k, v, *_, out_shape=None, **__: sdpa_flop_count(q, k, v)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda gradient, q, k, v, *_, out_shape=None, **__: sdpa_backward_flop_count(
            gradient, q, k, v
        )
    ),
}


def flop(program: DenseProgram) -> int:
    """Two a multiply-add of products, convolutions and fused attention."""
    events = (*program.forward, *program.backward)
    return sum(_flop(event) for event in events if isinstance(event, OpCall))


def _flop(call: OpCall) -> int:
    shapes = [operand.shape for operand in call.inputs]
    if call.name in ("mm", "bmm", "addmm", "baddbmm"):
        a, b = shapes[-2:]
        return 2 * math.prod(a) * b[-1]
    if call.name == "convolution":
        return 2 * call.outputs[0].elements * math.prod(shapes[1][1:])
    if call.name == "convolution_backward":
        # as much for the gradient of the weight, and of the input if there is one
        made = [out for out in call.outputs if len(out.shape) > 1]
        return len(made) * 2 * call.inputs[0].elements * math.prod(shapes[2][1:])
    if "dot_product" in call.name:
        backward = call.name.endswith("backward")
        query, key = shapes[1:3] if backward else shapes[:2]
        product = 2 * math.prod(query) * key[-2]
        return product * (5 if backward else 2)
    return 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("batch", [BATCH, 100])
def test_as_many_as_pytorch_counts(name: str, batch: int) -> None:
    make, shape = MODELS[name]
    module = make()
    captured = capture_dense(module, (), BATCH, example_inputs=(torch.empty(BATCH, *shape),))
    assert captured.captured.scales
    ours = flop(captured.program(AtBatch(batch)))
    counter = FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION)
    with counter:
        module(torch.randn(batch, *shape)).backward()
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.01)
