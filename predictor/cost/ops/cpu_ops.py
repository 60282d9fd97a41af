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
"""Bytes that are taken to be touched together."""
ALIGNMENT = 64
EDGES = tuple(2.0**power for power in range(19, 30))
"""Distances in bytes, 0.5 MiB to 512 MiB, between the bins."""
BINS = len(EDGES) + 1
STEPS = 2
"""The step is gone through so often that its start finds what the step before left."""


class Arena:
    """Addresses of memory that is taken and given back."""

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
            # what lies free at the end grows
            at_end = bool(self.gaps) and self.gaps[-1][1] == self.top
            start = self.gaps.pop()[0] if at_end else self.top
            self.top = start + size
        self.taken[storage] = (start, start + size)

    def give_back(self, storage: int) -> None:
        """Merge with the gaps on both sides; nothing happens to what has no address."""
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
    """When each granule was touched last; never is before everything."""

    def __init__(self) -> None:
        self.last = np.full(1024, -1, dtype=np.int64)
        self.clock = 0

    def distances(self, first: int, end: int) -> Array:
        """Distinct bytes since the last touch of each granule in a range of bytes."""
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
    """Bytes that each call touches, by the distance to their last touch, ``[BINS]`` a call.

    A call goes through its operands side by side, so what the call before touched lies as far back
    as all operands are large.

    Args:
        calls: of one step, which repeats; what it uses but has not made is there all the time.
    """
    arena, touched = Arena(), _Touched()
    held = _find_held(calls)
    for storage, size in held.items():
        arena.take(storage, size)
    found: list[Array] = []
    for _ in range(STEPS):
        found = [_call_bytes(call, arena, touched) for call in calls]
        for storage in [number for number in arena.taken if number not in held]:
            arena.give_back(storage)
    return found


def _find_held(calls: Sequence[OpCall]) -> dict[int, int]:
    """Memory that some call uses before any has made it."""
    made: set[int] = set()
    held: dict[int, int] = {}
    for call in calls:
        for operand in call.inputs:
            if operand.storage not in made:
                held[operand.storage] = operand.storage_bytes
        made |= {out.storage for out in call.outputs}
    return held


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
    """Each stretch of memory once, empty ones left out."""
    seen: set[tuple[int, tuple[int, int]]] = set()
    for operand in operands:
        key = (operand.storage, operand.span)
        if operand.elements and key not in seen:
            seen.add(key)
            yield operand


def _address(operand: Operand, arena: Arena) -> tuple[int, int]:
    start = arena.taken[operand.storage][0]
    first, end = operand.span
    return start + first, start + end


Array = NDArray[np.float64]

GEMMS = {"mm": "gemm", "addmm": "gemm", "bmm": "bmm"}
LAYOUTS = ("nn", "nt", "tn", "tt")
TILE_ROWS, TILE_COLUMNS = 16, 48
"""Of MKL's fp32 kernel for AVX-512: of 20 tried on shapes apart, the tile that left the least."""
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
        sizes: batch, m, n, k and 1 for a bias of a product; images, channels of an input and of an
            output, inputs an output is summed of in each channel, pixels of both of a convolution;
            of others stretches that lie together, elements written, elements read, elements whose
            stride meets the same lines of a cache. Custom ops have sizes of their own.
        reuse: bytes by distance (`predictor.cost.ops.cpu_ops.BINS`), of all calls together.
        count: calls.
    """

    kind: str
    sizes: tuple[int, ...]
    reuse: tuple[float, ...]
    count: int = 1


def kind_and_sizes(call: OpCall) -> tuple[str, tuple[int, ...]]:
    """The kind that a call belongs to, and its sizes."""
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
    # of a table of which a few rows are looked up most is not read; a sum reads all
    cap = math.inf if call.name == "sum" else 4 * most
    read = sum(min(operand.bytes // operand.item_bytes, cap) for operand in call.inputs)
    return call.kind, (
        max(map(_stretches, operands), default=0),
        most,
        int(read),
        max(map(_count_aliased, operands), default=0),
    )


def _convolution(call: OpCall) -> tuple[str, tuple[int, ...]]:
    """Kind, with the gradients that a backward gives: of the input, of the weight, or both.

    oneDNN does not put the channels of an image in blocks.
    """
    backward = call.name == CONVOLUTIONS[1]
    given, weight = call.inputs[1:3] if backward else call.inputs[:2]
    output = call.inputs[0] if backward else call.outputs[0]
    made = {operand.shape for operand in call.outputs} if backward else set()
    marks = "x" * (given.shape in made) + "w" * (weight.shape in made)
    marks = marks or (">" if weight.shape[1] > IMAGE_CHANNELS else "image>")
    return f"{call.name} {marks}", (
        given.shape[0],
        weight.shape[1],
        weight.shape[0],
        math.prod(weight.shape[2:]),
        math.prod(given.shape[2:]),
        math.prod(output.shape[2:]),
    )


def _stretches(operand: Operand) -> int:
    if not operand.shape or not operand.elements:
        return 1
    inner = operand.shape[-1] if operand.strides[-1] == 1 else 1
    return max(operand.bytes // operand.item_bytes // max(inner, 1), 1)


def _count_aliased(operand: Operand) -> int:
    """Elements of a strided walk, times how far short of all lines of a page its steps fall."""
    if not operand.shape or operand.shape[-1] == 1 or operand.strides[-1] in (0, 1):
        return 0
    step = math.gcd(operand.strides[-1] * operand.item_bytes, PAGE_BYTES)
    return round(operand.elements * max(0.0, math.log2(step / LINE_BYTES)))


def group_of(kind: str) -> str:
    """The group of a kind: the kinds that share a kernel model."""
    return GEMMS.get(kind.split()[0], kind)


def name_of(kind: str) -> str:
    """The op of a kind, whose model over all layouts is used where a layout was never measured."""
    return group_of(kind).split()[0]


@dataclass(frozen=True)
class Caches:
    """Sizes in bytes. What was touched a distance ``d`` ago misses a cache with the probability
    ``1 / (1 + (size / d)^2)``."""

    near_bytes: float
    far_bytes: float

    def misses(self, reuse: ArrayLike) -> Array:
        """Bytes that miss the near and the far cache: ``[..., BINS]`` to ``[..., 2]``."""
        sizes = np.array([self.near_bytes, self.far_bytes])
        chances = 1 / (1 + (sizes / _MIDDLES[:, None]) ** MISS_POWER)
        return np.asarray(np.asarray(reuse, dtype=np.float64) @ chances)


_MIDDLES = np.array([EDGES[0] / math.sqrt(2), *(edge * math.sqrt(2) for edge in EDGES)])


def work(row: OpRow, caches: Caches) -> Array:
    """What the time of a call is linear in, the mean of the row's calls."""
    return np.concatenate([plain_work(row), caches.misses(row.reuse) / row.count])


def plain_work(row: OpRow) -> Array:
    """Of `work`, what does not depend on the caches."""
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
    """A call, multiply-adds, elements and weights, all with channels in whole blocks."""
    into, out = (CHANNEL_BLOCK * math.ceil(of / CHANNEL_BLOCK) for of in (into, out))
    weights = float(window * into * out)
    elements = float(images * (into * pixels + out * out_pixels))
    return np.array([1.0, images * out_pixels * weights, elements, weights])


@dataclass(frozen=True)
class OpModels:
    """Fitted kernel models of CPU ops.

    Args:
        coefficients: group, or name of an op -> coefficients in the order of `work`, in ms.
        op_ms: what a step takes beyond its ops, per call of any op, views included.
        stretch: of all ops together, what a step takes for each ms that its ops take alone.
    """

    coefficients: Mapping[str, Array]
    caches: Caches
    op_ms: float = 0.0
    stretch: float = 1.0

    def has(self, kind: str) -> bool:
        """Whether ops of a kind can be priced."""
        return kind == VIEW or self._of(kind) is not None

    def _of(self, kind: str) -> Array | None:
        return self.coefficients.get(group_of(kind), self.coefficients.get(name_of(kind)))

    def row_ms(self, row: OpRow) -> float:
        """Time of all calls of a row."""
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
        """Time of many rows in a step, with what it takes beyond its ops."""
        calls = sum(row.count for row in rows)
        return self.stretch * sum(map(self.row_ms, rows)) + self.op_ms * calls
