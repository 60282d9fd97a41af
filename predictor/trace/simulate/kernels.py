"""Kernels of a trace whose shapes it carries: multiplications, and what a profile predicts."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from predictor.cost.gemm import batched_ms
from predictor.hardware.schema import HardwareProfile
from predictor.trace.events import DeviceEvent, HostEvent, RankTrace

GEMM_KERNEL = re.compile(r"gemm|splitKreduce|cutlass|s884|s1688|gemv", re.IGNORECASE)
TENSOR_FLOAT = re.compile(r"tf32|s1688gemm(?!_f?16)", re.IGNORECASE)
DATA_TYPES = {"float": "fp32", "c10::Half": "fp16", "c10::BFloat16": "bf16"}
FIRST_FACTOR = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Operator -> position of the left factor among its inputs (PyTorch native_functions.yaml)."""


@dataclass(frozen=True)
class GemmCall:
    """``count`` products ``[m, k] @ [k, n]`` and the kernels that ran them."""

    count: int
    m: int
    n: int
    k: int
    data_type: str
    kernels: tuple[DeviceEvent, ...]

    @property
    def measured_us(self) -> float:
        """Time of the kernels."""
        return sum(kernel.end_us - kernel.start_us for kernel in self.kernels)

    def predicted_ms(self, hw: HardwareProfile) -> float:
        """Time that a profile's model gives."""
        return batched_ms(hw, self.count, self.m, self.n, self.k, self.data_type)


def gemm_calls(trace: RankTrace) -> list[GemmCall]:
    """Multiplications with shapes and kernels, in the order of the program."""
    device: dict[int | None, list[DeviceEvent]] = {}
    for event in trace.device:
        device.setdefault(event.correlation, []).append(event)
    threads: dict[int, list[HostEvent]] = {}
    for call in trace.host:
        if call.kind == "runtime" and call.correlation in device:
            threads.setdefault(call.thread, []).append(call)
    found = []
    for op in trace.host:
        shape = _shape(op)
        if shape is None:
            continue
        kernels = tuple(
            event
            for call in _within(threads.get(op.thread, []), op)
            for event in device[call.correlation]
            if GEMM_KERNEL.search(event.name)
        )
        data_type = _data_type(op, kernels)
        if kernels and data_type is not None:
            found.append(GemmCall(*shape, data_type, kernels))
    return found


def _shape(op: HostEvent) -> tuple[int, int, int, int] | None:
    first = FIRST_FACTOR.get(op.name)
    if op.kind != "op" or first is None or op.shapes is None or len(op.shapes) < first + 2:
        return None
    left, right = op.shapes[first], op.shapes[first + 1]
    if len(left) != len(right) or len(left) not in (2, 3) or not all((*left, *right)):
        return None
    count = left[0] if len(left) == 3 else 1
    return count, left[-2], right[-1], left[-1]


def _data_type(op: HostEvent, kernels: tuple[DeviceEvent, ...]) -> str | None:
    first = FIRST_FACTOR[op.name]
    data_type = DATA_TYPES.get(op.dtypes[first]) if op.dtypes else None
    if data_type == "fp32" and any(TENSOR_FLOAT.search(kernel.name) for kernel in kernels):
        return "tf32"
    return data_type


def _within(calls: list[HostEvent], op: HostEvent) -> Iterator[HostEvent]:
    position = bisect_left(calls, op.start_us, key=lambda call: call.start_us)
    while position < len(calls) and calls[position].start_us < op.end_us:
        yield calls[position]
        position += 1
