"""Matrix products of a trace, with their shapes and the kernels that ran them."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

from predictor.cost.gemm import batched_ms
from predictor.hardware.device_names import profile_of_device
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.trace.events import DeviceEvent, HostEvent, RankTrace, values_around

GEMM_KERNEL = re.compile(r"gemm|splitKreduce|cutlass|s884|s1688|gemv", re.IGNORECASE)
TENSOR_FLOAT = re.compile(r"tf32|s1688gemm(?!_f?16)", re.IGNORECASE)
DATA_TYPES = {"float": "fp32", "c10::Half": "fp16", "c10::BFloat16": "bf16"}
FIRST_FACTOR = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Operator -> position of the left factor among its inputs (PyTorch native_functions.yaml)."""


@dataclass(frozen=True)
class GemmCall:
    """Call of ``count`` products ``[m, k] @ [k, n]``, with its kernels."""

    count: int
    m: int
    n: int
    k: int
    data_type: str
    kernels: tuple[DeviceEvent, ...]

    def predicted_ms(self, hw: HardwareProfile) -> float:
        return batched_ms(hw, self.count, self.m, self.n, self.k, self.data_type)


def gemm_calls(trace: RankTrace) -> list[GemmCall]:
    """Return multiplications with shapes and kernels, in program order."""
    products = {id(op): (op, shape) for op in trace.host if (shape := _shape(op)) is not None}
    kernels: dict[int, list[DeviceEvent]] = defaultdict(list)
    for correlation, ops in values_around(trace.host, {at: at for at in products}).items():
        for event in trace.launched.get(correlation, ()):
            if GEMM_KERNEL.search(event.name):
                for around in ops:
                    kernels[around].append(event)
    calls = []
    for at, (op, shape) in products.items():
        ran = tuple(kernels[at])
        data_type = _data_type(op, ran)
        if ran and data_type is not None:
            calls.append(GemmCall(*shape, data_type, ran))
    return calls


def _shape(op: HostEvent) -> tuple[int, int, int, int] | None:
    first = FIRST_FACTOR.get(op.name)
    if op.kind != "op" or first is None or op.shapes is None or len(op.shapes) < first + 2:
        return None
    left_shape, right_shape = op.shapes[first], op.shapes[first + 1]
    if (
        len(left_shape) != len(right_shape)
        or len(left_shape) not in (2, 3)
        or not all((*left_shape, *right_shape))
    ):
        return None
    count = left_shape[0] if len(left_shape) == 3 else 1
    return count, left_shape[-2], right_shape[-1], left_shape[-1]


def _data_type(op: HostEvent, kernels: tuple[DeviceEvent, ...]) -> str | None:
    first = FIRST_FACTOR[op.name]
    data_type = DATA_TYPES.get(op.dtypes[first]) if op.dtypes else None
    if data_type == "fp32" and any(TENSOR_FLOAT.search(kernel.name) for kernel in kernels):
        return "tf32"
    return data_type


def traced_profile(trace: RankTrace) -> HardwareProfile | None:
    """Return the profile of a trace's device, None if no profile describes it."""
    name = profile_of_device(trace.device_name or "")
    return None if name is None else load_hardware(name)
