"""The dense part as it was captured from a module: a program whose sizes grow with the batch.

Sizes are expressions of the batch size ``B`` and of the ids that features bring, which the capture
found and checked; at a workload's numbers they give its `DenseProgram`.

An ops file writes them as ``64*B``, ``n0 + B`` or ``B/2``. A size is a polynomial with rational
coefficients in the batch size ``B`` and in numbers of ids. It is read by a grammar of its own, so
that nothing of a file is ever run as code:

    size = term (("+" | "-") term)*      term = factor ("*" factor)* ("/" integer)?
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Annotated, Protocol

from pydantic import PlainValidator

from predictor.errors import InputError
from predictor.model.autocast import autocast
from predictor.model.dense_settings import (
    ComputedDense,
    DenseOptimizer,
    ProductType,
)
from predictor.model.op_calls import (
    DenseProgram,
    Event,
    Gradient,
    Lookup,
    LookupBackward,
    OpCall,
    Operand,
)
from predictor.section import NOT_IN_FILE, named, refuse

Size = int | str
"""A number, or the text of an expression."""

MAX_LENGTH = 200
MAX_TERMS = 16
MAX_DEGREE = 4
MAX_VALUE = 2**62
_FACTOR = r"(?:\d{1,19}|[A-Za-z][A-Za-z0-9]{0,9})"
_TERM = re.compile(
    rf"\s*([-+]?)\s*({_FACTOR}(?:\s*\*\s*{_FACTOR})*)(?:\s*/\s*(0*[1-9]\d{{0,18}}))?\s*"
)


@dataclass(frozen=True)
class Expression:
    """A polynomial.

    Args:
        terms: names that are multiplied, in order, and what with; no names for the constant.
    """

    terms: tuple[tuple[tuple[str, ...], Fraction], ...]

    @property
    def names(self) -> frozenset[str]:
        """Names that the expression depends on."""
        return frozenset(name for names, _ in self.terms for name in names)

    def value(self, at: Mapping[str, int]) -> int:
        """Return the size at these values of names; half an element counts as one."""
        exact = sum(
            (factor * math.prod(at[name] for name in names) for names, factor in self.terms),
            Fraction(0),
        )
        size = math.ceil(exact)
        if not 0 <= size <= MAX_VALUE:
            raise InputError(f"the size '{self}' is {size}; sizes are 0 to {MAX_VALUE}")
        return size

    def __str__(self) -> str:
        text = "".join(_term(names, factor) for names, factor in self.terms)
        return text.removeprefix(" + ").replace(" - ", "-", text.startswith(" - ")) or "0"


def _term(names: tuple[str, ...], factor: Fraction) -> str:
    top, sign = abs(factor.numerator), "-" if factor < 0 else "+"
    product = "*".join(([] if names and top == 1 else [str(top)]) + list(names))
    return f" {sign} {product}" + (f"/{factor.denominator}" if factor.denominator > 1 else "")


def polynomial(terms: Iterable[tuple[tuple[str, ...], Fraction]]) -> Expression:
    """Build an expression from terms in any order; the highest come first."""
    merged: Counter[tuple[str, ...]] = Counter()
    for names, factor in terms:
        merged[tuple(sorted(names))] += factor  # type: ignore[assignment]
    nonzero = [(names, Fraction(factor)) for names, factor in merged.items() if factor]
    return Expression(tuple(sorted(nonzero, key=lambda term: (-len(term[0]), term[0]))))


@lru_cache(maxsize=65536)
def parse_size(text: str) -> Expression:
    """Parse an expression."""
    terms: list[tuple[tuple[str, ...], Fraction]] = []
    at = 0
    while at < len(text) <= MAX_LENGTH and len(terms) < MAX_TERMS:
        match = _TERM.match(text, at)
        if match is None or (terms and not match[1]):
            raise _refused(text)
        factors = [factor.strip() for factor in match[2].split("*")]
        names = tuple(factor for factor in factors if not factor.isdigit())
        number = math.prod(int(factor) for factor in factors if factor.isdigit())
        if len(names) > MAX_DEGREE:
            raise _refused(text)
        sign = -1 if match[1] == "-" else 1
        terms.append((names, Fraction(sign * number, int(match[3] or 1))))
        at = match.end()
    if not terms or at < len(text):
        raise _refused(text)
    return polynomial(terms)


def _refused(text: str) -> InputError:
    return InputError(
        f"got the size {text[:60]!r}; a size is a number or a sum of products of numbers and "
        f"names, such as '64*B + n0', of at most {MAX_LENGTH} characters, {MAX_TERMS} terms and "
        f"{MAX_DEGREE} names a term"
    )


BATCH = "B"

ITEM_BYTES = {
    **dict.fromkeys(("complex128",), 16),
    **dict.fromkeys(("fp64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("fp32", "int32", "uint32"), 4),
    **dict.fromkeys(("fp16", "bf16", "int16", "uint16"), 2),
    **dict.fromkeys(("fp8", "int8", "uint8", "bool"), 1),
}
"""Bytes of an element, by the name of its type."""


class EventKind(StrEnum):
    OP = "op"
    LOOKUP = "lookup"
    LOOKUP_BACKWARD = "lookup_backward"
    GRADIENT = "gradient"


@dataclass(frozen=True)
class SizedOperand:
    """A tensor whose sizes may be expressions.

    Args:
        storage: number of the memory that it lies in.
        strides: in elements; None where the elements lie in order without gaps.
        offset: in elements.
    """

    storage: int
    data_type: str
    shape: tuple[Size, ...]
    strides: tuple[Size, ...] | None = None
    offset: Size = 0

    @property
    def sizes(self) -> tuple[Size, ...]:
        return (*self.shape, *(self.strides or ()), self.offset)


@dataclass(frozen=True)
class SizedEvent:
    """A call of an op, a lookup, its backward, or a gradient that is complete.

    Args:
        name: of the op or of the embedding module; empty for a gradient.
        freed: storages that are given back before the next event.
        elements, item_bytes: of a gradient.
        path: of the module that an op belongs to; empty where it is not known.
    """

    kind: EventKind
    name: str
    inputs: tuple[SizedOperand, ...] = ()
    outputs: tuple[SizedOperand, ...] = ()
    freed: tuple[int, ...] = ()
    mutates: bool = False
    elements: int = 0
    item_bytes: int = 4
    path: str = ""


class Numbers(Protocol):
    """Batch size and ids that sizes depend on; a `Workload` has them."""

    @property
    def batch_size(self) -> int:
        """Samples of a rank."""

    @property
    def ids_per_sample(self) -> Mapping[tuple[str, str], float]:
        """Mean ids of a sample, by embedding module and feature."""


@dataclass(frozen=True)
class CapturedProgram:
    """Ops of one run of a module, for any batch size; equal if the digests are equal.

    Args:
        module: class of the module.
        batch_size: samples at which it was captured.
        scales: False if the ops themselves depend on the batch size, which is then fixed.
        features: features of each embedding module, in the order of its tables.
        ids: name in expressions -> embedding modules and features whose ids it counts together.
        storages: bytes of all memory, by number.
        resident: parameters and buffers.
        optimizer_name: optimizer of the dense parameters.
        state_bytes: bytes of the dense optimizer's states.
        loss: way in which the loss was found in the module's output.
        in_features: dense inputs of a sample, which are copied to the device.
        tied_ids: mean ids of a sample at the capture, of features whose ids the module takes in
            that number only, such as ``view(B, 100, -1)``: sizes grow with the batch alone.
        digest: of the file's content.
    """

    module: str = field(compare=False)
    batch_size: int = field(compare=False)
    scales: bool = field(compare=False)
    features: Mapping[str, tuple[str, ...]] = field(compare=False)
    ids: Mapping[str, tuple[tuple[str, str], ...]] = field(compare=False)
    storages: tuple[Size, ...] = field(compare=False)
    resident: tuple[SizedOperand, ...] = field(compare=False)
    forward: tuple[SizedEvent, ...] = field(compare=False)
    backward: tuple[SizedEvent, ...] = field(compare=False)
    optimizer: tuple[SizedEvent, ...] = field(compare=False)
    optimizer_name: str = field(compare=False)
    state_bytes: int = field(compare=False)
    loss: str = field(compare=False)
    in_features: int = field(compare=False)
    tied_ids: Mapping[str, float] = field(compare=False, default_factory=dict)
    digest: str = ""

    @property
    def events(self) -> Iterator[SizedEvent]:
        yield from self.forward
        yield from self.backward
        yield from self.optimizer

    def texts(self) -> set[str]:
        """Return all expressions of the program."""
        operands = (o for e in self.events for o in (*e.inputs, *e.outputs))
        sizes = {size for o in (*self.resident, *operands) for size in o.sizes}
        return {size for size in sizes.union(self.storages) if isinstance(size, str)}

    @cached_property
    def _programs(self) -> dict[tuple[int, tuple[tuple[str, int], ...], bool], DenseProgram]:
        """Cached programs, by batch size, numbers of ids and autocast."""
        return {}

    def at(
        self, batch: int, counts: tuple[tuple[str, int], ...], *, bf16: bool = False
    ) -> DenseProgram:
        """Return the program at a batch size and numbers of ids.

        Args:
            bf16: run it under autocast.
        """
        key = batch, counts, bf16
        if key not in self._programs:
            program = autocast(self.at(batch, counts)) if bf16 else self._make(batch, counts)
            self._programs[key] = program
        return self._programs[key]

    def _make(self, batch: int, counts: tuple[tuple[str, int], ...]) -> DenseProgram:
        at = {BATCH: batch, **dict(counts)}
        values: dict[Size, int] = {text: parse_size(text).value(at) for text in self.texts()}

        def value(size: Size) -> int:
            return size if isinstance(size, int) else values[size]

        storages = [value(size) for size in self.storages]
        operands: dict[int, Operand] = {}

        def operand(sized: SizedOperand) -> Operand:
            if id(sized) not in operands:
                operands[id(sized)] = _operand(sized, storages, value)
            return operands[id(sized)]

        parts = (self.forward, self.backward, self.optimizer)
        forward, backward, step = (tuple(_event(e, operand) for e in part) for part in parts)
        resident = tuple(operand(sized) for sized in self.resident)
        return DenseProgram(batch, forward, backward, step, resident, self.state_bytes)


def _program(value: object) -> CapturedProgram:
    """text"""
    if isinstance(value, CapturedProgram):
        return value
    raise refuse(value, "it must be the name of an ops file that to_yaml wrote")


@dataclass(frozen=True)
class CapturedDense(ComputedDense):
    """A dense part that `to_yaml` captured from a module."""

    captured: Annotated[CapturedProgram, PlainValidator(_program), named("ops")]
    """The ops file that to_yaml wrote, relative to this one."""
    data_type: ProductType = "fp32"
    """Type of its products of fp32 tensors, bf16 by autocast; ops that were captured under autocast
    stay as they are."""
    file: Annotated[str, NOT_IN_FILE] = ""
    """Name of the ops file beside the model file; empty for one that lies in none."""
    optimizer: DenseOptimizer = ""
    """That of the capture, which it must agree with."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "optimizer", self.captured.optimizer_name)

    @property
    def in_features(self) -> int:
        return self.captured.in_features

    def program(self, workload: Numbers) -> DenseProgram:
        """Return the ops at a workload's batch size and ids."""
        captured = self.captured
        if not captured.scales and workload.batch_size != captured.batch_size:
            raise InputError(
                f"{self.file or captured.module}: its ops depend on the batch size and are those "
                f"of {captured.batch_size}, but the batch size is {workload.batch_size}; run "
                "to_yaml with that batch size",
                inputs=("batch_size",),
            )
        try:
            bf16 = self.data_type == "bf16"
            return captured.at(workload.batch_size, self._counts(workload), bf16=bf16)
        except InputError as error:
            raise InputError(f"{self.file or captured.module}: {error}") from None

    def _counts(self, workload: Numbers) -> tuple[tuple[str, int], ...]:
        per_sample = workload.ids_per_sample
        return tuple(
            (name, sum(math.ceil(per_sample[key] * workload.batch_size) for key in keys))
            for name, keys in self.captured.ids.items()
        )


def _operand(sized: SizedOperand, storages: list[int], value: Callable[[Size], int]) -> Operand:
    shape = tuple(map(value, sized.shape))
    strides = contiguous(shape) if sized.strides is None else tuple(map(value, sized.strides))
    operand = Operand(
        sized.storage,
        storages[sized.storage],
        value(sized.offset),
        shape,
        strides,
        ITEM_BYTES[sized.data_type],
        sized.data_type,
    )
    if operand.elements > MAX_VALUE or operand.span[1] > operand.storage_bytes > 0:
        raise InputError(
            f"a tensor of {list(sized.shape)} needs {operand.span[1]} bytes, but its storage "
            f"{sized.storage} has {operand.storage_bytes}"
        )
    return operand


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of gapless elements in order; an empty axis counts as one element."""
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def _event(event: SizedEvent, operand: Callable[[SizedOperand], Operand]) -> Event:
    inputs = tuple(map(operand, event.inputs))
    outputs = tuple(map(operand, event.outputs))
    if event.kind is EventKind.OP:
        return OpCall(event.name, inputs, outputs, event.freed, event.mutates, event.path)
    if event.kind is EventKind.LOOKUP:
        return Lookup(event.name, outputs)
    if event.kind is EventKind.LOOKUP_BACKWARD:
        return LookupBackward(event.name, inputs)
    return Gradient(event.elements, event.item_bytes)
