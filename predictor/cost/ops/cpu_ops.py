"""Ops of a framework on one CPU core: matrix products, and what goes through memory.

The calls of one group share a kernel model, which is linear in the work of a call and in the bytes
that miss a near and a far cache (docs/model.md, chapter 22): the core's own, and the part of the
shared last-level cache that this core gets to keep. Convolutions have one model per direction;
oneDNN keeps channels in blocks as wide as a vector and pads the last block.

A cache of S bytes that evicts the least recently used holds what was touched less than S distinct
bytes ago (stack distance, Mattson et al. 1970). Distances follow from the ops of a step alone:
their operands, and where the allocator puts them. It is taken to fill the smallest free gap that is
large enough and to merge gaps that touch, as glibc does with large blocks.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from predictor.errors import InputError
from predictor.model.op_calls import OpCall, Operand

GRANULE = 16 * 1024
"""Bytes that count as touched together."""
ALIGNMENT = 64
EDGES = tuple(2.0**power for power in range(19, 30))
"""Distances in bytes, 0.5 MiB to 512 MiB, between the bins."""
BINS = len(EDGES) + 1
STEPS = 2
"""Passes over the step, so that its start meets the memory that the step before left."""


class Arena:
    """Allocator that gives addresses to memory that is taken and given back."""

    def __init__(self) -> None:
        self.top = 0
        self.taken: dict[int, tuple[int, int]] = {}
        self.gaps: list[tuple[int, int]] = []

    def take(self, storage: int, size: int) -> None:
        if storage in self.taken:
            return
        size = max(-(-size // ALIGNMENT) * ALIGNMENT, ALIGNMENT)
        fits = [(end - start, start, end) for start, end in self.gaps if end - start >= size]
        if fits:
            _, start, end = min(fits)
            self.gaps.remove((start, end))
            if start + size < end:
                bisect.insort(self.gaps, (start + size, end))
        else:
            # a gap at the end grows
            at_end = bool(self.gaps) and self.gaps[-1][1] == self.top
            start = self.gaps.pop()[0] if at_end else self.top
            self.top = start + size
        self.taken[storage] = (start, start + size)

    def give_back(self, storage: int) -> None:
        """Free memory and merge it with the gaps on both sides; skip a storage without address."""
        if storage not in self.taken:
            return
        start, end = self.taken.pop(storage)
        at = bisect.bisect(self.gaps, (start, end))
        if at < len(self.gaps) and self.gaps[at][0] == end:
            end = self.gaps.pop(at)[1]
        if at and self.gaps[at - 1][1] == start:
            at -= 1
            start = self.gaps.pop(at)[0]
        self.gaps.insert(at, (start, end))


class _Touched:
    """Clock of each granule's last touch; -1 if it was never touched."""

    def __init__(self) -> None:
        self.last = np.full(1024, -1, dtype=np.int64)
        self.clock = 0

    def distances(self, first: int, end: int) -> Array:
        """Return the distinct bytes since the last touch of each granule in a range of bytes."""
        low, high = first // GRANULE, -(-end // GRANULE)
        while high > len(self.last):
            self.last = np.concatenate([self.last, np.full(len(self.last), -1, dtype=np.int64)])
        before = self.last[low:high]
        order = np.sort(self.last)
        later = len(order) - np.searchsorted(order, before, side="right")
        return np.where(before < 0, np.inf, later * float(GRANULE))

    def touch(self, first: int, end: int) -> None:
        self.clock += 1
        self.last[first // GRANULE : -(-end // GRANULE)] = self.clock


def reuse_bytes(calls: Sequence[OpCall]) -> list[Array]:
    """Count the bytes that each call touches by the distance to their last touch.

    A call goes through its operands side by side, so the operands of the call before it lie as far
    back as all its own operands are large.

    Args:
        calls: of one step, which repeats; memory that it uses but does not make lasts all the time.

    Returns:
        ``[BINS]`` for each call.
    """
    arena, touched = Arena(), _Touched()
    lasting = _find_held(calls)
    for storage, size in lasting.items():
        arena.take(storage, size)
    rows: list[Array] = []
    for _ in range(STEPS):
        rows = [_call_bytes(call, arena, touched) for call in calls]
        for storage in [number for number in arena.taken if number not in lasting]:
            arena.give_back(storage)
    return rows


def _find_held(calls: Sequence[OpCall]) -> dict[int, int]:
    """Return the memory that a call uses before any call writes it: storage -> bytes."""
    written: set[int] = set()
    lasting: dict[int, int] = {}
    for call in calls:
        for operand in call.inputs:
            if operand.storage not in written:
                lasting[operand.storage] = operand.storage_bytes
        written |= {out.storage for out in call.outputs}
    return lasting


def _call_bytes(call: OpCall, arena: Arena, touched: _Touched) -> Array:
    sums = np.zeros(BINS)
    operands = list(_unlike(call.inputs + call.outputs))
    for operand in operands:
        arena.take(operand.storage, operand.storage_bytes)
    if call.moves:
        ranges = [_address(operand, arena) for operand in operands]
        together = sum(end - first for first, end in ranges)
        for operand, (first, end) in zip(operands, ranges, strict=True):
            distances = touched.distances(first, end) + together
            bins = np.searchsorted(EDGES, distances, side="right")
            sums += operand.bytes * np.bincount(bins, minlength=BINS) / len(bins)
        for first, end in ranges:
            touched.touch(first, end)
    for storage in call.freed:
        arena.give_back(storage)
    return sums


def _unlike(operands: Sequence[Operand]) -> Iterator[Operand]:
    """Yield each stretch of memory once, without empty ones."""
    keys: set[tuple[int, tuple[int, int]]] = set()
    for operand in operands:
        key = (operand.storage, operand.span)
        if operand.elements and key not in keys:
            keys.add(key)
            yield operand


def _address(operand: Operand, arena: Arena) -> tuple[int, int]:
    start = arena.taken[operand.storage][0]
    first, end = operand.span
    return start + first, start + end


Array = NDArray[np.float64]

GEMMS = {"mm": "gemm", "addmm": "gemm", "bmm": "bmm"}
LAYOUTS = ("nn", "nt", "tn", "tt")
TILE_ROWS, TILE_COLUMNS = 16, 48
"""Tile of MKL's fp32 kernel for AVX-512: of 20, the one with the least error on other shapes."""
CONVOLUTIONS = ("convolution", "convolution_backward")
CHANNEL_BLOCK = 16
"""Numbers of a vector of AVX-512, which oneDNN's blocked layouts keep side by side."""
IMAGE_CHANNELS = 4
LINE_BYTES, PAGE_BYTES = 64, 4096
VIEW = "view"
"""The kind of all ops that touch no data."""
MISS_POWER = 2


@dataclass(frozen=True)
class OpRow:
    """Calls of one kind and one size.

    Args:
        sizes: product: batch, m, n, k and 1 for a bias. Convolution: images, channels of input and
            output, inputs summed in each channel for one output, pixels of input and output.
            Others: contiguous stretches, elements written, elements read, elements whose stride
            meets the same lines of a cache. Custom ops have sizes of their own.
        reuse: bytes by distance (`predictor.cost.ops.cpu_ops.BINS`), of all calls together.
        count: calls.
    """

    kind: str
    sizes: tuple[int, ...]
    reuse: tuple[float, ...]
    count: int = 1


def kind_and_sizes(call: OpCall) -> tuple[str, tuple[int, ...]]:
    """Return the kind that a call belongs to, and its sizes."""
    if not call.moves:
        return VIEW, ()
    if call.name in GEMMS:
        a, b = call.inputs[-2:]
        batch = a.shape[0] if len(a.shape) == 3 else 1
        sizes = (batch, a.shape[-2], b.shape[-1], a.shape[-1], int(call.name == "addmm"))
        return f"{call.name} {a.side}{b.side}", sizes
    if call.name in CONVOLUTIONS:
        return _convolution(call)
    written = call.inputs[:1] if call.mutates else call.outputs
    most = max((operand.elements for operand in written), default=0)
    operands = (*call.inputs, *written)
    # a gather reads few rows of its table; a sum reads everything
    cap = math.inf if call.name == "sum" else 4 * most
    read = sum(min(operand.bytes // operand.item_bytes, cap) for operand in call.inputs)
    return call.kind, (
        max(map(_stretches, operands), default=0),
        most,
        int(read),
        max(map(_count_aliased, operands), default=0),
    )


def _convolution(call: OpCall) -> tuple[str, tuple[int, ...]]:
    """Return the kind and sizes of a convolution.

    The kind of a backward names its gradients: of the input, of the weight, or both. oneDNN does
    not put the channels of an image in blocks.
    """
    backward = call.name == CONVOLUTIONS[1]
    image, weight = call.inputs[1:3] if backward else call.inputs[:2]
    output = call.inputs[0] if backward else call.outputs[0]
    gradients = {operand.shape for operand in call.outputs} if backward else set()
    marks = "x" * (image.shape in gradients) + "w" * (weight.shape in gradients)
    marks = marks or (">" if weight.shape[1] > IMAGE_CHANNELS else "image>")
    return f"{call.name} {marks}", (
        image.shape[0],
        weight.shape[1],
        weight.shape[0],
        math.prod(weight.shape[2:]),
        math.prod(image.shape[2:]),
        math.prod(output.shape[2:]),
    )


def _stretches(operand: Operand) -> int:
    if not operand.shape or not operand.elements:
        return 1
    inner = operand.shape[-1] if operand.strides[-1] == 1 else 1
    return max(operand.bytes // operand.item_bytes // max(inner, 1), 1)


def _count_aliased(operand: Operand) -> int:
    """Count the elements of a strided walk, weighted by log2 of the cache lines that steps skip."""
    if not operand.shape or operand.shape[-1] == 1 or operand.strides[-1] in (0, 1):
        return 0
    step = math.gcd(operand.strides[-1] * operand.item_bytes, PAGE_BYTES)
    return round(operand.elements * max(0.0, math.log2(step / LINE_BYTES)))


def group_of(kind: str) -> str:
    """Return the group of a kind: the kinds that share a kernel model."""
    return GEMMS.get(kind.split()[0], kind)


def name_of(kind: str) -> str:
    """Return the op of a kind; its model over all layouts serves layouts without measurements."""
    return group_of(kind).split()[0]


@dataclass(frozen=True)
class Caches:
    """Sizes of a near and a far cache in bytes.

    Memory touched a distance ``d`` ago misses a cache with probability ``1 / (1 + (size / d)^2)``.
    """

    near_bytes: float
    far_bytes: float

    def misses(self, reuse: ArrayLike) -> Array:
        """Return the bytes that miss the near and far cache, ``[..., BINS]`` to ``[..., 2]``."""
        sizes = np.array([self.near_bytes, self.far_bytes])
        chances = 1 / (1 + (sizes / _MIDDLES[:, None]) ** MISS_POWER)
        return np.asarray(np.asarray(reuse, dtype=np.float64) @ chances)


_MIDDLES = np.array([EDGES[0] / math.sqrt(2), *(edge * math.sqrt(2) for edge in EDGES)])


def work(row: OpRow, caches: Caches) -> Array:
    """Return the quantities in which the time of a call is linear, as a mean over the row."""
    return np.concatenate([plain_work(row), caches.misses(row.reuse) / row.count])


def plain_work(row: OpRow) -> Array:
    """Return the part of `work` that does not depend on the caches."""
    if name_of(row.kind) in CONVOLUTIONS:
        return _convolution_work(*row.sizes)
    if group_of(row.kind) not in GEMMS.values():
        return np.array([1.0, *row.sizes])
    batch, m, n, k, bias = row.sizes
    padded = math.ceil(m / TILE_ROWS) * TILE_ROWS * math.ceil(n / TILE_COLUMNS) * TILE_COLUMNS
    layout = row.kind.split()[1]
    plain = [float(m * n * k * (layout == each)) for each in LAYOUTS]
    of_one = np.array([1.0, padded * k, m * k, k * n, m * n, bias * m * n, *plain])
    return np.concatenate([[1.0], batch * of_one])


def _convolution_work(
    images: int, into: int, out: int, window: int, pixels: int, out_pixels: int
) -> Array:
    """Return one call, multiply-adds, elements and weights, with channels in whole blocks."""
    into, out = (CHANNEL_BLOCK * math.ceil(channels / CHANNEL_BLOCK) for channels in (into, out))
    weights = float(window * into * out)
    elements = float(images * (into * pixels + out * out_pixels))
    return np.array([1.0, images * out_pixels * weights, elements, weights])


@dataclass(frozen=True)
class OpModels:
    """Fitted kernel models of CPU ops.

    Args:
        coefficients: group, or name of an op -> coefficients in the order of `work`, in ms.
        op_ms: time of a step beyond its ops, per call of any op, views included.
        stretch: time of all ops of a step together, over the sum of their times alone.
    """

    coefficients: Mapping[str, Array]
    caches: Caches
    op_ms: float = 0.0
    stretch: float = 1.0

    def has(self, kind: str) -> bool:
        """Tell whether ops of a kind can be priced."""
        return kind == VIEW or self._of(kind) is not None

    def _of(self, kind: str) -> Array | None:
        return self.coefficients.get(group_of(kind), self.coefficients.get(name_of(kind)))

    def row_ms(self, row: OpRow) -> float:
        """Return the time of all calls of a row in ms."""
        if row.kind == VIEW:
            return 0.0
        model = self._of(row.kind)
        if model is None:
            raise InputError(
                f"no kernel model for the op '{row.kind}': no calibration step ran it; measure "
                "again with shapes of its family"
            )
        return row.count * float(work(row, self.caches) @ model)

    def rows_ms(self, rows: Sequence[OpRow]) -> float:
        """Return the time of many rows in a step in ms, with its time beyond its ops."""
        calls = sum(row.count for row in rows)
        return self.stretch * sum(map(self.row_ms, rows)) + self.op_ms * calls
