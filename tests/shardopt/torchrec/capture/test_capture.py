"""Captured programs; their FLOP against PyTorch's own counter; expressions of sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from predictor.cost.ops.op_time import OpTimes, read_and_written
from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.model.captured import CapturedDense, parse_size
from predictor.model.op_calls import CAUSAL, DenseProgram, Gradient, OpCall
from shardopt.config.ops_file import ops_text, read_ops_content
from shardopt.torchrec.capture.capture import SizeFit, capture_dense
from tests.quick import quick_only
from tests.shardopt.torchrec.capture.modules import (
    Attention,
    Autocast,
    Convolutions,
    Einsum,
    Encoder,
    Mlp,
)
from tests.shardopt.torchrec.capture.sizes import AtBatch, flop

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


def captured(module: nn.Module, *shape: int, **more: Any) -> CapturedDense:
    """The ops of a module that takes a tensor with these axes behind the batch."""
    example = (torch.empty(BATCH, *shape),)
    return capture_dense(module, (), BATCH, example_inputs=example, **more)


def program_of(module: nn.Module, *shape: int, **more: Any) -> DenseProgram:
    return captured(module, *shape, **more).program(AtBatch(BATCH))


@cache
def captured_model(name: str) -> CapturedDense:
    """The ops of one of the models above."""
    make, shape = MODELS[name]
    return captured(make(), *shape)


@pytest.mark.parametrize("name", quick_only(["recomputed", "convolutions", "attention"], MODELS))
def test_as_many_as_pytorch_counts(name: str) -> None:
    make, shape = MODELS[name]
    module, dense = make(), captured_model(name)
    assert dense.captured.scales
    for batch in (BATCH, 100):
        counter = FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION)
        with counter:
            module(torch.randn(batch, *shape)).backward()
        ours = flop(dense.program(AtBatch(batch)))
        assert ours == pytest.approx(counter.get_total_flops(), rel=0.01)


def test_another_batch_is_what_a_capture_there_finds() -> None:
    here, there = (
        capture_dense(Attention(), (), batch, example_inputs=(torch.empty(batch, 12, 32),))
        for batch in (BATCH, 200)
    )
    assert here.program(AtBatch(200)) == there.program(AtBatch(200))


def test_the_module_is_left_as_it_is() -> None:
    module = Mlp().eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    captured(module, 24)
    assert not module.training
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert all(type(parameter) is nn.Parameter for parameter in module.parameters())


def test_parameters_may_lie_nowhere() -> None:
    real, nowhere = (captured(module, 24) for module in (Mlp(), Mlp().to("meta")))
    assert real.program(AtBatch(BATCH)) == nowhere.program(AtBatch(BATCH))


def test_gradients_come_in_the_order_of_the_backward() -> None:
    program = program_of(Mlp(), 24)
    sizes = [e.elements for e in program.backward if isinstance(e, Gradient)]
    assert sizes == [1, 48, 48, 24 * 48]
    assert program.gradient_bytes == 4 * sum(sizes)


def test_a_weight_that_is_used_twice_is_one_parameter() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x)).sum()

    program = program_of(Tied(), 8)
    assert len(program.resident) == 1
    assert program.gradient_bytes == 4 * 64


def test_recomputation_keeps_less_and_computes_more() -> None:
    plain, recomputed = (
        captured_model(name).program(AtBatch(BATCH)) for name in ("encoder", "recomputed")
    )
    assert flop(recomputed) > 1.2 * flop(plain)
    assert kept_bytes(recomputed) < 0.5 * kept_bytes(plain)


def kept_bytes(program: DenseProgram) -> int:
    """Return the bytes that the forward makes and leaves."""
    live: dict[int, int] = {}
    for event in program.forward:
        if isinstance(event, OpCall):
            live |= {out.storage: out.storage_bytes for out in event.outputs}
            for number in event.freed:
                live.pop(number, None)
    return sum(live.values())


def test_autocast_for_gpus_counts() -> None:
    program = program_of(Autocast(), 16)
    products = [e for e in program.forward if isinstance(e, OpCall) and e.name == "addmm"]
    assert [call.outputs[0].data_type for call in products] == ["bf16", "bf16"]


@pytest.mark.parametrize("name", quick_only(["recomputed", "convolutions", "einsum"], MODELS))
def test_autocast_of_captured_ops_is_what_a_capture_under_autocast_finds(name: str) -> None:
    make, shape = MODELS[name]
    plain, module = captured(make(), *shape, device="cuda"), make()
    halves = captured(module, *shape, device="cuda", data_type="bf16")
    assert halves.data_type == "bf16"
    batch, hardware = AtBatch(512), load_hardware("h100-sxm")

    def costs(dense: CapturedDense) -> tuple[float, float, int]:
        """Device time, bytes that ops read and write, and what the forward leaves in memory."""
        program, times = dense.program(batch), OpTimes(hardware, "bf16")
        calls = [e for e in (*program.forward, *program.backward) if isinstance(e, OpCall)]
        moved = [o.bytes for c in calls if c.moves for part in read_and_written(c) for o in part]
        return sum(times.cost(call).ms for call in calls), sum(moved), kept_bytes(program)

    derived = costs(replace(plain, data_type="bf16"))
    expected, before = costs(halves), costs(plain)
    assert derived[0] == pytest.approx(expected[0], rel=0.1)
    assert derived[1:] == pytest.approx(expected[1:], rel=0.35)
    assert derived != before
    assert costs(replace(halves, data_type="fp32")) == expected, "what was captured so stays"


@pytest.mark.parametrize(("device", "norms"), [("cuda", "fp32"), ("cpu", "bf16")])
def test_autocast_leaves_in_fp32_what_it_does_on_gpus(device: str, norms: str) -> None:
    module = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 1))
    program = program_of(module, 16, data_type="bf16", device=device)
    dtypes = {
        event.name: event.outputs[0].data_type
        for event in program.forward
        if isinstance(event, OpCall)
    }
    assert dtypes["native_layer_norm"] == norms
    assert dtypes["addmm"] == "bf16"
    with torch.autocast("cpu", torch.bfloat16):  # and nowhere else
        assert nn.functional.layer_norm(torch.ones(2, 8).bfloat16(), (8,)).dtype == torch.bfloat16


def test_attention_of_flash_kernels_is_captured_with_its_mask() -> None:
    class Flash(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(32, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * self.scale
            attend = torch.ops.aten._scaled_dot_product_flash_attention
            attended: torch.Tensor = attend(x[:, :, 4:], x, x, 0.0, True)[0]
            return attended.float().sum()

    x = torch.empty(BATCH, 2, 12, 32, dtype=torch.bfloat16)
    captured = capture_dense(Flash(), (), BATCH, example_inputs=(x,))
    read = read_ops_content(ops_text(captured.captured).encode(), "ops")
    names = [event.name for event in read.forward]
    assert f"_scaled_dot_product_flash_attention{CAUSAL}" in names


@pytest.mark.parametrize(("device", "fused"), [("cuda", 2), ("cpu", 0)])
def test_attention_with_dropout_is_one_op_on_gpus_alone(device: str, fused: int) -> None:
    module = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.1), 2
    )
    program = program_of(module, 10, 32, device=device)
    names = [event.name for event in program.forward if isinstance(event, OpCall)]
    assert sum("dot_product" in name for name in names) == fused
    assert any("softmax" in name for name in names) == (not fused)


@pytest.mark.parametrize(("optimizer", "states"), [("sgd", 0), ("adagrad", 1), ("adam", 2)])
def test_the_optimizer_steps_with_its_states(optimizer: str, states: int) -> None:
    program = program_of(Mlp(), 24, optimizer=optimizer)
    parameters = sum(operand.elements for operand in program.resident)
    counters = 4 * 4 * (states > 0)
    assert program.state_bytes == 4 * parameters * states + counters
    assert any(isinstance(e, OpCall) and e.mutates for e in program.optimizer)


def test_ops_that_depend_on_the_batch_are_of_that_batch_alone() -> None:
    class Chunked(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([super(Chunked, self).forward(part) for part in x.split(50)]).sum()

    dense = captured(Chunked(), 24)
    assert not dense.captured.scales
    dense.program(AtBatch(BATCH))
    with pytest.raises(InputError, match="depend on the batch size"):
        dense.program(AtBatch(100))


NAMES = {
    "B": (512, 704, 1088, 1856),
    "n0": (1000, 60_019, 31_415, 92_653),
    "n1": (77, 5_003, 40_009, 8_171),
}


@pytest.mark.parametrize(
    "text",
    ["7", "64*B", "B + 1", "B/2", "100*B + n0", "2*n0 - n1 + 3", "4*B*B", "64*B*n1", "B*B/2 - B/2"],
)
def test_an_expression_is_found_from_its_values(text: str) -> None:
    expression = parse_size(text)
    values = tuple(
        expression.value({name: sizes[at] for name, sizes in NAMES.items()}) for at in range(4)
    )
    fitted = SizeFit(NAMES).size(values)
    assert parse_size(str(fitted)) == expression


@pytest.mark.parametrize("values", [(1, 2, 4, 9), (512, 704, 1088, 1857), (3, 3, 3, 4)])
def test_what_fits_nothing_has_none(values: tuple[int, ...]) -> None:
    assert SizeFit(NAMES).size(values) is None


@pytest.mark.parametrize(
    ("optimizer", "device", "passes"),
    [
        ("sgd", "cuda", 3),
        # lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2, addcdiv 4
        ("adam", "cuda", 18),
        # parameter and both states in and out, and the gradient in
        (partial(torch.optim.AdamW, fused=True), "cuda", 7),
        (partial(torch.optim.Adam, foreach=False), "cuda", 18),
        ("adam", "cpu", 18),
    ],
)
def test_an_optimizer_moves_the_bytes_that_its_kernels_do(
    optimizer: Any, device: str, passes: int
) -> None:
    program = program_of(Mlp(), 24, optimizer=optimizer, device=device)
    calls = [e for e in program.optimizer if isinstance(e, OpCall) and e.moves]
    moved = sum(o.bytes for c in calls for side in read_and_written(c) for o in side)
    assert moved == pytest.approx(passes * program.gradient_bytes, rel=0.2)
    at_once = device == "cuda" and getattr(optimizer, "keywords", {}).get("foreach", True)
    assert (len(calls) < 3 * 4) == at_once


def test_an_optimizer_that_is_not_known_is_refused() -> None:
    with pytest.raises(InputError, match="RMSprop"):
        captured(Mlp(), 24, optimizer=torch.optim.RMSprop)
