"""From a module to its captured program: one step with all its memory, three for the sizes.

Sizes of several captures become exact expressions of the batch size and the ids of features: one is
looked for as ``c x + d``, then as ``c x + e y + d``, with x and y among the batch size, numbers of
ids and products with the batch size. Three captures fix the numbers and a fourth, at sizes that
nothing ties to the others, must agree exactly; coefficients are small fractions.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import combinations
from operator import itemgetter
from typing import Any

from predictor.errors import InputError
from predictor.model.captured import (
    BATCH,
    CapturedDense,
    CapturedProgram,
    EventKind,
    Size,
    SizedEvent,
    SizedOperand,
    contiguous,
    parse_size,
    polynomial,
)
from predictor.model.op_calls import Gradient, Lookup, LookupBackward, OpCall, Operand
from predictor.model.workload import Table
from shardopt.config.ops_file import with_ops_digest
from shardopt.extras import needs_torchrec
from shardopt.torchrec.capture.inputs import BatchNumbers, from_features, like_example
from shardopt.torchrec.capture.step import (
    BACKWARD,
    OPTIMIZER,
    DenseOptimizer,
    RecordedStep,
    name_of_optimizer,
    record_step,
)
from shardopt.torchrec.tables import find_embedding_modules

with needs_torchrec():
    from torch import nn

CAPTURES = 4
MAX_DENOMINATOR = 64
Values = tuple[int, ...]
Term = tuple[str, ...]


class SizeFit:
    """Finds expressions for what sizes were in each capture.

    Args:
        names: values of the batch size and of numbers of ids in each capture.
    """

    def __init__(self, names: Mapping[str, Values]) -> None:
        batch = names[BATCH]
        self.terms: dict[Term, Values] = {(name,): values for name, values in names.items()}
        for name, values in names.items():
            products = tuple(a * b for a, b in zip(batch, values, strict=True))
            self.terms[BATCH, name] = products
        self.known: dict[Values, Size | None] = {}

    def size(self, values: Values) -> Size | None:
        """The expression that has these values; None if none was found."""
        if values not in self.known:
            same = len(set(values)) == 1
            self.known[values] = values[0] if same else self._one(values) or self._two(values)
        return self.known[values]

    def _one(self, v: Values) -> Size | None:
        for term, x in self.terms.items():
            if x[0] == x[1]:
                continue
            factor = Fraction(v[1] - v[0], x[1] - x[0])
            rest = v[0] - factor * x[0]
            if factor and _agrees(v, rest, (factor, x)):
                return str(polynomial([(term, factor), ((), rest)]))
        return None

    def _two(self, v: Values) -> Size | None:
        for (first, x), (second, y) in combinations(self.terms.items(), 2):
            a, b = x[1] - x[0], y[1] - y[0]
            c, d = x[2] - x[0], y[2] - y[0]
            p, q = v[1] - v[0], v[2] - v[0]
            determinant = a * d - b * c
            if not determinant:
                continue
            of_x = Fraction(p * d - b * q, determinant)
            of_y = Fraction(a * q - c * p, determinant)
            rest = v[0] - of_x * x[0] - of_y * y[0]
            if _agrees(v, rest, (of_x, x), (of_y, y)):
                return str(polynomial([(first, of_x), (second, of_y), ((), rest)]))
        return None


def _agrees(v: Values, rest: Fraction, *terms: tuple[Fraction, Values]) -> bool:
    factors = [rest, *(factor for factor, _ in terms)]
    if any(factor.denominator > MAX_DENOMINATOR for factor in factors):
        return False
    return all(
        value == rest + sum(factor * x[at] for factor, x in terms) for at, value in enumerate(v)
    )


Keys = tuple[tuple[str, str], ...]
Event = OpCall | Gradient | Lookup | LookupBackward
Parts = tuple[list[Event], list[Event], list[Event]]
Made = tuple[tuple[Size, ...], tuple[SizedOperand, ...], tuple[tuple[SizedEvent, ...], ...]]
BATCH_STEPS = (0, 192, 576, 1344)
"""Additions to the batch size; multiples of 64, so that divisors of the batch divide them."""
MOST_IDS = 100_000


def _names(features: Mapping[str, Sequence[str]]) -> dict[str, Keys]:
    """Names of numbers of ids: one a feature, then one for all of a module and one for all."""
    each = [((module, feature),) for module, names in features.items() for feature in names]
    modules = [
        tuple((module, f) for f in names) for module, names in features.items() if len(names) > 1
    ]
    first: dict[str, tuple[str, str]] = {}
    for module, names in features.items():
        for feature in names:
            first.setdefault(feature, (module, feature))
    everything = (
        [tuple(first.values())] if len(first) > 1 and tuple(first.values()) not in modules else []
    )
    return {f"n{at}": keys for at, keys in enumerate([*each, *modules, *everything])}


def _with_used_names(captured: CapturedProgram) -> CapturedProgram:
    used = {name for text in captured.texts() for name in parse_size(text).names}
    return replace(captured, ids={n: keys for n, keys in captured.ids.items() if n in used})


def _numbers(
    per_sample: Mapping[str, float], batch_size: int, at: int, tied: Collection[str]
) -> BatchNumbers:
    """Sizes of one of the captures; ids are those of the batch, or more of features that are not
    tied to it."""
    batch = batch_size + BATCH_STEPS[at]
    rng = random.Random(at)
    ids = {}
    for name, mean in per_sample.items():
        more = rng.randrange(1, MOST_IDS)
        ids[name] = math.ceil(mean * batch) + (0 if at == 0 or name in tied else more)
    return BatchNumbers(batch, ids)


def _tied(per_sample: Mapping[str, float], numbers: Sequence[BatchNumbers]) -> dict[str, float]:
    """Features that had as many ids a sample in all captures, with that number."""
    return {
        name: mean
        for name, mean in per_sample.items()
        if all(n.ids[name] == math.ceil(mean * n.batch_size) for n in numbers)
    }


def _others(
    record: Callable[..., RecordedStep], per_sample: Mapping[str, float], batch_size: int
) -> tuple[list[Parts], list[BatchNumbers]]:
    """Steps at other sizes.

    Where it cannot be run with just any number of ids, it needs as many of every sample: first of
    features with one, then of those with a whole number, then of all.
    """
    ties = [
        frozenset[str](),
        frozenset(name for name, mean in per_sample.items() if mean == 1),
        frozenset(name for name, mean in per_sample.items() if mean == int(mean)),
        frozenset(per_sample),
    ]
    for tied in dict.fromkeys(ties):
        numbers = [_numbers(per_sample, batch_size, at, tied) for at in range(CAPTURES)]
        try:
            steps = [_parts(record(n, sizes_only=True)) for n in numbers[1:]]
        except InputError:
            continue
        return steps, numbers
    return [], []


def _parts(step: RecordedStep) -> Parts:
    """Forward, backward and optimizer, with what happens between calls in its place."""
    recording = step.recording
    parts: Parts = ([], [], [])
    between: Iterable[tuple[int, Event]] = recording.events
    calls: Iterable[tuple[int, Event]] = (
        (number, recorded.call) for number, recorded in enumerate(recording.calls)
    )
    for number, event in heapq.merge(between, calls, key=itemgetter(0)):
        parts[_part(number, recording.marks, event)].append(event)
    return parts


def _part(number: int, marks: Mapping[str, int], event: Any) -> int:
    """Part of a call or an event; gradients are those of the backward, the last of them, too."""
    if isinstance(event, Lookup):
        return 0
    if isinstance(event, Gradient | LookupBackward):
        return 1
    return (number >= marks[BACKWARD]) + (number >= marks[OPTIMIZER])


def _operands(event: Event) -> tuple[tuple[Operand, ...], tuple[Operand, ...]]:
    """Return the operands that an event reads, and those it makes."""
    gradients = getattr(event, "gradients", ())
    return getattr(event, "inputs", gradients), getattr(event, "outputs", ())


def _shape_of(parts: Parts) -> list[Any]:
    """Return the parts of a capture that do not depend on its numbers of samples and ids."""
    return [
        (
            type(e),
            getattr(e, "name", ""),
            [[(o.storage, len(o.shape)) for o in operands] for operands in _operands(e)],
        )
        for part in parts
        for e in part
    ]


class _Sized:
    """Puts captures that differ in their sizes alone together."""

    def __init__(self, steps: Sequence[Parts], fit: SizeFit | None) -> None:
        self.steps, self.fit = steps, fit
        self.operands: dict[tuple[Operand, ...], SizedOperand] = {}
        self.storages: dict[int, Size] = {}

    def made(self, first: RecordedStep) -> Made:
        """Storages, resident operands and the three parts."""
        resident = tuple(self._operand((operand,)) for operand in first.resident)
        parts = tuple(
            tuple(self._event(events) for events in zip(*aligned, strict=True))
            for aligned in zip(*self.steps, strict=True)
        )
        count = 1 + max(self.storages, default=-1)
        return tuple(self.storages.get(n, 0) for n in range(count)), resident, parts

    def _event(self, events: Sequence[Event]) -> SizedEvent:
        event = events[0]
        if isinstance(event, Gradient):
            kind = EventKind.GRADIENT
            return SizedEvent(kind, "", elements=event.elements, item_bytes=event.item_bytes)
        sides = list(zip(*map(_operands, events), strict=True))
        inputs, outputs = (
            tuple(self._operand(side) for side in zip(*s, strict=True)) for s in sides
        )
        if isinstance(event, OpCall):
            freed = tuple(sorted(event.freed))
            kind, name = EventKind.OP, event.name
            return SizedEvent(kind, name, inputs, outputs, freed, event.mutates, path=event.path)
        kind = EventKind.LOOKUP if isinstance(event, Lookup) else EventKind.LOOKUP_BACKWARD
        return SizedEvent(kind, event.module, inputs, outputs)

    def _operand(self, operands: tuple[Operand, ...]) -> SizedOperand:
        if operands not in self.operands:
            self.operands[operands] = self._new(operands)
        return self.operands[operands]

    def _new(self, operands: tuple[Operand, ...]) -> SizedOperand:
        first = operands[0]
        number = first.storage
        size = self._size([o.storage_bytes for o in operands])
        # memory that a later op makes longer
        if isinstance(self.storages.get(number, 0), int):
            self.storages[number] = size
        in_order = all(o.strides == contiguous(o.shape) for o in operands)
        return SizedOperand(
            number,
            first.data_type,
            self._sizes([o.shape for o in operands]),
            None if in_order else self._sizes([o.strides for o in operands]),
            self._size([o.offset for o in operands]),
        )

    def _sizes(self, shapes: Sequence[tuple[int, ...]]) -> tuple[Size, ...]:
        return tuple(self._size(values) for values in zip(*shapes, strict=True))

    def _size(self, values: Iterable[int]) -> Size:
        all_values: Values = tuple(values)
        if self.fit is None or len(all_values) == 1:
            return all_values[0]
        size = self.fit.size(all_values)
        if size is None:
            raise _NoExpressionError
        return size


class _NoExpressionError(Exception):
    """A size is none that `SizeFit` looks for."""


def capture_dense(
    module: nn.Module,
    tables: Sequence[Table],
    batch_size: int,
    *,
    example_inputs: Any = None,
    optimizer: DenseOptimizer = "sgd",
    data_type: str = "fp32",
    device: str = "cpu",
    scale: bool = True,
) -> CapturedDense:
    """Everything of a module but its embedding tables, as the ops of a training step.

    The module runs on fake tensors: nothing is computed, and it is left as it is.

    Args:
        module: unsharded, on any device, ``meta`` too.
        tables: of the workload, with the ids that features bring.
        batch_size: samples of a rank.
        example_inputs: what forward takes, as a tuple, a mapping by parameter, or the only
            argument; None to make it from the features.
        optimizer: of the dense parameters, by its name or by what makes one.
        data_type: of products: ``fp32``, ``tf32``, or ``bf16`` to run forward under autocast.
        device: type of the devices that are planned for; decides which attention there is, and how
            an optimizer steps.
        scale: find out how sizes grow with the batch; else they hold for this batch alone.

    Raises:
        InputError: the module cannot be captured; names the op and the line of the user's model,
            or the input that is missing, and what else to try.
    """
    if "forward" not in dir(type(module)) or module.forward.__name__ == "_forward_unimplemented":
        raise InputError(
            f"{type(module).__name__} has no forward, so there is nothing to capture; give the "
            "module that is trained"
        )
    features: dict[str, list[str]] = {}
    per_sample: dict[str, float] = {}
    for table in tables:
        for feature in table.features:
            features.setdefault(table.module, []).append(feature.name)
            per_sample.setdefault(feature.name, feature.lookups_per_sample)
    inputs = (
        from_features(module, features)
        if example_inputs is None
        else like_example(example_inputs, module, batch_size)
    )
    paths = [path for path, _, _ in find_embedding_modules(module)]
    modules = {path: path or "ebc" for path in paths if (path or "ebc") in features}
    bf16 = data_type == "bf16"
    record = partial(record_step, module, modules, inputs, optimizer, bf16, device == "cuda")
    first = record(_numbers(per_sample, batch_size, 0, per_sample))
    if first.loss.startswith("none"):
        raise InputError(
            "no output of forward depends on a parameter, so there is no backward to capture; "
            "return the loss, or the outputs that the loss is made from"
        )
    names = _names(features)
    steps, fit, tied = [_parts(first)], None, per_sample
    if scale:
        more, numbers = _others(record, per_sample, batch_size)
        steps += [(forward, backward, steps[0][2]) for forward, backward, _ in more]
        tied = _tied(per_sample, numbers)
        if more and all(_shape_of(parts) == _shape_of(steps[0]) for parts in steps):
            by_name = {
                name: tuple(sum(n.ids[f] for _, f in keys) for n in numbers)
                for name, keys in names.items()
            }
            fit = SizeFit({BATCH: tuple(n.batch_size for n in numbers), **by_name})
    try:
        sized, scales = _Sized(steps if fit else steps[:1], fit).made(first), fit is not None
    except _NoExpressionError:
        sized, scales = _Sized(steps[:1], None).made(first), False
    storages, resident, (forward, backward, step) = sized
    captured = CapturedProgram(
        module=type(module).__name__,
        batch_size=batch_size,
        scales=scales,
        features={name: tuple(feature_names) for name, feature_names in features.items()},
        ids=names if scales else {},
        storages=storages,
        resident=resident,
        forward=forward,
        backward=backward,
        optimizer=step,
        optimizer_name=name_of_optimizer(optimizer),
        state_bytes=first.state_bytes,
        loss=first.loss,
        in_features=first.input_elements // batch_size,
        tied_ids=tied if scales else per_sample,
    )
    captured = with_ops_digest(_with_used_names(captured))
    return CapturedDense(captured, data_type)
