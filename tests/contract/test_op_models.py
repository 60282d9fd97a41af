"""Contract of every op's kernel model on every shipped profile, and random programs."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from predictor.cost.dense import DenseSegment, DenseWork, Execution, price
from predictor.cost.gemm import product_rate
from predictor.cost.ops.op_time import (
    ATTENTION,
    CONVOLUTIONS,
    FILLS,
    GATHERS,
    KNOWN,
    PRODUCTS,
    SCATTERS,
    OpTimes,
)
from predictor.hardware.loader import list_hardware, load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.model.op_calls import (
    DenseProgram,
    Event,
    Gradient,
    Lookup,
    LookupBackward,
    OpCall,
    Operand,
)

GROWTH = (1, 2, 7, 40, 300)


def tensor(storage: int, *shape: int, item: int = 4) -> Operand:
    strides = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
    return Operand(storage, item * math.prod(shape), 0, shape, strides, item, "fp32")


def call_of(name: str, x: int) -> OpCall:
    """A call that grows with ``x``."""
    n = 64 * x
    if name in PRODUCTS:
        batch = (4,) if name in ("bmm", "baddbmm") else ()
        a, b, out = tensor(1, *batch, n, 64), tensor(2, *batch, 64, 96), tensor(3, *batch, n, 96)
        if name == "linear":
            return OpCall(name, (a, tensor(2, 96, 64)), (out,))
        added = (tensor(4, 96),) if PRODUCTS[name] else ()
        return OpCall(name, (*added, a, b), (out,))
    if name in CONVOLUTIONS:
        image, weight, out = (
            tensor(1, n, 8, 16, 16),
            tensor(2, 32, 8, 3, 3),
            tensor(3, n, 32, 14, 14),
        )
        if name.endswith("backward"):
            outputs = (tensor(4, n, 8, 16, 16), tensor(5, 32, 8, 3, 3))
            return OpCall(name, (out, image, weight), outputs)
        return OpCall(name, (image, weight), (out,))
    if name in ATTENTION:
        q = [tensor(at, x, 8, 64, 32) for at in range(1, 5)]
        return OpCall(name, tuple(q), (tensor(9, x, 8, 64, 32),))
    if name in GATHERS:
        return OpCall(name, (tensor(1, 10**5, 32), tensor(2, n, item=8)), (tensor(3, n, 32),))
    if name in SCATTERS:
        rows = (tensor(1, 10**5, 32), tensor(2, n, item=8), tensor(3, n, 32))
        return OpCall(name, rows, (tensor(4, 10**5, 32),))
    return OpCall(name, (tensor(1, n, 64), tensor(2, n, 64)), (tensor(3, n, 64),))


NAMES = sorted({*PRODUCTS, *CONVOLUTIONS, *ATTENTION, *KNOWN, "an_op_that_nobody_knows"})


@pytest.mark.parametrize("profile", list_hardware())
def test_every_op_is_finite_positive_never_falls_and_ends_linear(profile: str) -> None:
    hw = load_hardware(profile)
    times = OpTimes(hw, "fp32")
    for name in NAMES:
        costs = [times.cost(call_of(name, x)) for x in GROWTH]
        ms = [cost.ms for cost in costs]
        assert np.isfinite(ms).all(), name
        assert min(ms) > 0, name
        assert all(a <= b * (1 + 1e-9) for a, b in pairwise(ms)), (name, ms)
        assert all(1 <= cost.kernels < 20 for cost in costs), name
        # far out a size twice as large takes twice as long
        far = [times.cost(call_of(name, x)).ms for x in (20_000, 40_000)]
        assert 1.7 < far[1] / far[0] < 2.2, (name, far)


@pytest.mark.parametrize("profile", ["h100-sxm", "cpu-gloo"])
@pytest.mark.parametrize("axes", range(5))
@pytest.mark.parametrize("count", range(5))
def test_an_op_with_operands_of_another_has_a_price(profile: str, axes: int, count: int) -> None:
    """A damaged file of ops may hold an op with operands of another."""
    times, shape = OpTimes(load_hardware(profile), "fp32"), (4,) * axes
    operands = tuple(tensor(at, *shape) for at in range(1, count + 1))
    for name in NAMES:
        for outputs in ((), (tensor(9, *shape),)):
            assert 0 <= times.cost(OpCall(name, operands, outputs)).ms < 1, name


def test_names_are_in_one_family() -> None:
    assert not KNOWN & {*PRODUCTS, *CONVOLUTIONS, *ATTENTION}
    assert not FILLS & (GATHERS | SCATTERS)


def total(work: DenseWork) -> float:
    steps = (*work.forward, *work.backward, work.optimizer)
    return sum(step.cost_ms for step in steps if isinstance(step, DenseSegment))


def worth(hw: HardwareProfile) -> Callable[[int, int], float]:
    return lambda kernels, views, casts: 1e-3 * (kernels * hw.overheads.launch_us + views)


@st.composite
def programs(draw: st.DrawFn) -> DenseProgram:
    """Any ops in any order, with lookups and gradients among them."""

    def ops(least: int) -> list[Event]:
        names = draw(st.lists(st.sampled_from(NAMES), min_size=least, max_size=12))
        return [call_of(name, draw(st.integers(1, 50))) for name in names]

    outputs = tensor(1, 64, 64)
    forward = [*ops(0), Lookup("ebc", (outputs,)), *ops(0)]
    backward = [*ops(1), LookupBackward("ebc", (tensor(3, 64, 64),)), *ops(0)]
    backward.insert(draw(st.integers(0, len(backward))), Gradient(draw(st.integers(1, 10**8))))
    return DenseProgram(64, tuple(forward), tuple(backward), tuple(ops(0)))


@pytest.mark.parametrize("profile", ["h100-sxm", "t4", "cpu-gloo"])
@given(program=programs(), compiled=st.booleans(), cuda_graphs=st.booleans())
@settings(max_examples=40, deadline=None)
def test_any_program_has_a_price(
    profile: str, program: DenseProgram, compiled: bool, cuda_graphs: bool
) -> None:
    hw = load_hardware(profile)
    times = OpTimes(hw, "fp32")
    execution = Execution(worth(hw), compiled, cuda_graphs)
    work = price(program, ("ebc", "other"), times, execution)
    assert math.isfinite(total(work))
    assert all(
        s.cost_ms >= 0 and s.host_ms >= 0 and s.kernels >= 1
        for s in (*work.forward, *work.backward)
        if isinstance(s, DenseSegment)
    )
    plain = price(program, ("ebc", "other"), times, Execution(worth(hw)))
    events = (*program.forward, *program.backward, *program.optimizer)
    each = sum(times.cost(event).ms for event in events if isinstance(event, OpCall))
    if not hw.inline:
        assert total(plain) == pytest.approx(each)
    # one pass over outer memory is no slower than the passes that it replaces
    assert total(work) <= total(plain) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("profile", "data_type"),
    [("h100-sxm", "fp32"), ("h100-sxm", "tf32"), ("a100-40gb", "tf32"), ("cpu-gloo", "fp32")],
)
@pytest.mark.parametrize("length", [32, 100, 200])
def test_a_transformer_layer_is_not_faster_than_its_flop(
    profile: str, data_type: str, length: int
) -> None:
    """Products and attention at the profile's own rate of large products are a floor."""
    hw, batch, width, heads = load_hardware(profile), 256, 128, 4
    tokens = batch * length
    shapes = [
        (tokens, 3 * width, width),
        (tokens, width, width),
        (tokens, 4 * width, width),
        (tokens, width, 4 * width),
    ]
    calls: list[Event] = [
        OpCall("addmm", (tensor(1, n), tensor(2, m, k), tensor(3, k, n)), (tensor(4, m, n),))
        for m, n, k in shapes
    ]
    q = [tensor(at, batch, heads, length, width // heads) for at in (5, 6, 7)]
    calls.append(
        OpCall(
            "_scaled_dot_product_efficient_attention",
            tuple(q),
            (tensor(8, batch, heads, length, width // heads),),
        )
    )
    flop = sum(2 * m * n * k for m, n, k in shapes) + 4 * batch * length * length * width
    work = price(
        DenseProgram(batch, tuple(calls), (), ()), (), OpTimes(hw, data_type), Execution(worth(hw))
    )
    floor = flop / product_rate(hw.gemm, data_type, hw.name)
    assert floor <= total(work) < 12 * floor
