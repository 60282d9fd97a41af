"""The numbers that a captured program depends on, and its FLOP."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from predictor.model.op_calls import DenseProgram, OpCall


@dataclass(frozen=True)
class AtBatch:
    """A batch, and the ids of features by module and name."""

    batch_size: int
    ids_per_sample: dict[tuple[str, str], float] = field(default_factory=dict)


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
        outputs = [out for out in call.outputs if len(out.shape) > 1]
        return len(outputs) * 2 * call.inputs[0].elements * math.prod(shapes[2][1:])
    if "dot_product" in call.name:
        backward = "backward" in call.name
        query, key = shapes[1:3] if backward else shapes[:2]
        product = 2 * math.prod(query) * key[-2]
        return product * (5 if backward else 2)
    return 0
