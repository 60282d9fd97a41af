"""The ops of one training step as a framework issues them: what each reads, writes and frees."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Operand:
    """A tensor that an op is given or gives back.

    Args:
        storage: number of the memory that it lies in; views share it.
        storage_bytes: of that memory.
        offset, strides: in elements.
        item_bytes: of one element.
        data_type: such as ``fp32``, ``bf16`` or ``int64``; empty where it was not noted.
    """

    storage: int
    storage_bytes: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    data_type: str = ""

    @property
    def elements(self) -> int:
        """Elements, each counted as often as it is seen."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes that a pass over it touches; what broadcasting repeats counts once."""
        sizes = [n for n, stride in zip(self.shape, self.strides, strict=True) if stride]
        return math.prod(sizes) * self.item_bytes

    @property
    def span(self) -> tuple[int, int]:
        """First and last byte within its memory, the last exclusive."""
        steps = zip(self.shape, self.strides, strict=True)
        last = sum((n - 1) * stride for n, stride in steps) if self.elements else -1
        return self.offset * self.item_bytes, (self.offset + last + 1) * self.item_bytes


@dataclass(frozen=True)
class OpCall:
    """One call of an op.

    Args:
        name: such as ``mm``, without namespace and overload.
        inputs, outputs: tensors in the order of the arguments and results.
        freed: numbers of the memory that is given back before the next call.
        mutates: it writes into an input.
    """

    name: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    freed: tuple[int, ...] = field(default=())
    mutates: bool = False

    @property
    def moves(self) -> bool:
        """Whether it touches data: views and empty tensors do not."""
        given = {operand.storage for operand in self.inputs}
        if self.name.startswith("empty") or self.name in ("_local_scalar_dense", "new_empty"):
            return False
        return self.mutates or any(out.storage not in given for out in self.outputs)

    @property
    def layout(self) -> str:
        """A letter a tensor: which of them a kernel walks through in an unlike way."""
        widest = max((o.elements for o in self.inputs + self.outputs), default=0)
        given = "".join(letter(operand, widest) for operand in self.inputs)
        return given if self.mutates else f"{given}>{len(self.outputs)}"

    @property
    def kind(self) -> str:
        """Calls of one kind share a kernel model; only their sizes differ."""
        return f"{self.name} {self.layout}"


def letter(operand: Operand, widest: int) -> str:
    """``s`` a single element, ``b`` fewer than the widest tensor has, ``c`` contiguous; else the
    order of its axes in memory, such as ``0213``."""
    if operand.elements <= 1:
        return "s"
    axes = [(n, stride) for n, stride in zip(operand.shape, operand.strides, strict=True) if n > 1]
    if operand.elements < widest or not all(stride for _, stride in axes):
        return "b"
    expected, dense = 1, True
    for n, stride in reversed(axes):
        dense &= stride == expected
        expected *= n
    if dense:
        return "c"
    order = sorted(range(len(axes)), key=lambda axis: -axes[axis][1])
    return "".join(map(str, order))
