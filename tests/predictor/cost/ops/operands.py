"""Operands of a type and shape, contiguous, that tests of ops share."""

from __future__ import annotations

import math

from predictor.model.op_calls import Operand

ITEM = {"fp32": 4, "bf16": 2, "int64": 8}


def tensor(storage: int, *shape: int, data_type: str = "fp32") -> Operand:
    strides = tuple(math.prod(shape[at + 1 :]) for at in range(len(shape)))
    item = ITEM[data_type]
    return Operand(storage, item * math.prod(shape), 0, shape, strides, item, data_type)
