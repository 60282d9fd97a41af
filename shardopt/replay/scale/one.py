"""A program at another batch size, out of one trace of it. The spine.

Sizes become symbols (`walk`), the symbols that are the batch's are separated from the rest
(`decide`), and what comes out is run again on fake tensors, op by op.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from predictor.errors import InputError
from shardopt.replay.program.build import RECEIVED, SENT
from shardopt.replay.program.program import (
    Call,
    RankProgram,
    Slot,
    TensorSpec,
    nested,
    number_outputs,
    slots,
)
from shardopt.replay.program.schema import find_op, ops_of
from shardopt.replay.program.tensors import contiguous
from shardopt.replay.program.values import is_lookup
from shardopt.replay.scale.decide import Growth
from shardopt.replay.scale.rules import find_ids
from shardopt.replay.scale.sizes import UndecidedError, batch_unclear
from shardopt.replay.scale.walk import BAGS, FAILS, IDLE, run, walk_program

DIVISIONS = ops_of("aten div div_")
TRANSPOSES = ops_of("aten t transpose numpy_T mT")
LENGTHS = "fbgemm::permute_2D_sparse_data"
"""Takes a row of lengths a feature, with one of each sample."""
FOREIGN = ("backward of ", "c10d::", "fbgemm::")
"""Calls that fake tensors know nothing of."""
Shape = tuple[int, ...]
Specs = Mapping[int, TensorSpec]


def scale_alone(program: RankProgram, times: int, given: int | None = None) -> RankProgram:
    """The program at `times` the batch of its trace; recorded times are dropped.

    What its tensors hold is as before: `shardopt.replay.program.values.fills_of` makes it anew.

    Args:
        given: samples of a rank in the trace, where its lookups do not tell.

    Raises:
        InputError: the trace does not tell which sizes are the batch's; lists the ops.
    """
    samples = samples_of(program, given)
    program = name_transposes(program, samples)
    try:
        walk = walk_program(program, samples)
    except UndecidedError as error:
        raise batch_unclear(str(error)) from error
    growth = Growth(walk)

    def sized(term: Any) -> Any:
        return growth.at(term, times) if isinstance(term, torch.SymInt) else term

    def shaped(spec: TensorSpec | None, shape: Any) -> TensorSpec | None:
        if spec is None or shape is None:
            return spec
        return restride(spec, nested(sized, shape))

    olds = program.specs()
    news = place_storages(program.made, nested(sized, tuple(walk.made.values())))
    made, calls = dict(news), []
    for call, walked, shapes in zip(program.calls, walk.calls, walk.outputs, strict=True):
        specs = nested(shaped, call.specs, (*shapes, *[None] * (len(call.specs) - len(shapes))))
        scaled = replace(
            call,
            arguments=nested(sized, walked.arguments),
            keywords={name: nested(sized, term) for name, term in walked.keywords.items()},
            specs=specs,
            us=None,
        )
        calls.append(_with_totals(scaled, olds, news))
        news.update(number_outputs(call.outputs, specs))
    return check_scaled(program, replace(program, calls=calls, made=made))


def name_transposes(program: RankProgram, samples: int) -> RankProgram:
    """The program with numbers of their own for transposes of matrices of samples by samples.

    Traces without strides do not tell the transpose of a square matrix from the matrix, and where
    the batch is as large as a width, a gradient of both is square. The next op that reads the
    matrix reads the transpose.
    """
    specs, calls = program.specs(), list(program.calls)
    last = max(program.numbers(), default=0)
    square = ((samples, samples), (samples, 1))
    pending: dict[int, int] = {}
    for at, call in enumerate(calls):
        for number in pending.keys() & call.reads():
            last, place = last + 1, pending.pop(number)
            calls[place] = replace(calls[place], outputs=(last,))
            reader = call.renumber({number: last})
            call = calls[at] = replace(reader, outputs=call.outputs, frees=(*call.frees, last))
        first = call.arguments[0] if call.arguments else None
        if call.op in TRANSPOSES and isinstance(first, Slot) and not call.gives():
            both = (specs.get(first.number), call.specs[0])
            if all(of and (of.shape, of.strides) == square for of in both):
                pending[first.number] = at
    return replace(program, calls=calls)


def _with_totals(call: Call, olds: Specs, news: Specs) -> Call:
    """A scaled call with the bytes of a collective, and the divisor of a mean, of its new sizes."""
    if call.bytes is not None and call.collective not in RECEIVED:
        sent = [n for name, term in call.named().items() if name in SENT for n in slots(term)]
        before, after = (
            sum(prod(of[n].shape) * getattr(torch, of[n].dtype).itemsize for n in sent)
            for of in (olds, news)
        )
        return replace(call, bytes=call.bytes * after // before) if before else call
    if call.op in DIVISIONS:
        # a mean's gradient is divided by as many numbers as the mean is of
        of, by, *rest = call.arguments
        before, after = (prod(specs[slots(of)[0]].shape) for specs in (olds, news))
        if isinstance(by, (int, float)) and by == before > 1:
            return replace(call, arguments=(of, type(by)(after), *rest))
    return call


def samples_of(program: RankProgram, given: int | None) -> int:
    """Samples of a rank: the fewest bags of a lookup, those of its own batch.

    Args:
        given: as the user says.

    Raises:
        InputError: there are no lookups and nothing is given, or both disagree.
    """
    bags = set(_bags(program))
    if given is None and not bags:
        raise InputError(
            "the trace has no lookups that tell its batch; give the samples of a rank in the "
            "trace, or a trace of the same job at twice the batch too",
            inputs=("batch", "doubled"),
        )
    samples = min(bags) if given is None else given
    odd = sorted(n for n in bags if n % samples)
    if odd:
        raise InputError(
            f"the batch cannot be scaled: lookups of rank {program.rank} have {odd[0]} bags, which "
            f"is no multiple of {samples} samples",
            inputs=("batch",) if given else (),
        )
    if samples < 2:
        raise batch_unclear("a batch of one sample does not tell its sizes from others")
    return samples


def _bags(program: RankProgram) -> Iterator[int]:
    specs = program.specs()
    for call in program.calls:
        first = call.specs[0] if call.specs else None
        if not isinstance(first, TensorSpec) or not first.shape:
            continue
        if call.op in BAGS or _pools(call, first.shape[0], program, specs):
            yield first.shape[0]
        lengths = call.arguments[1] if call.op == LENGTHS else None
        if isinstance(lengths, Slot) and lengths.number in specs:
            yield specs[lengths.number].shape[-1]


def _pools(call: Call, rows: int, program: RankProgram, specs: Specs) -> bool:
    """Whether a lookup of FBGEMM gives a row a bag: its offsets, behind its ids, have that many."""
    if not is_lookup(call.op) or "backward" in call.op:
        return False
    given = [term for term in call.arguments if isinstance(term, Slot)]
    at = find_ids(program.fills, given)
    offsets = None if at is None else specs.get(given[at + 1].number)
    return offsets is not None and bool(rows) and (offsets.shape[0] - 1) % rows == 0


def restride(spec: TensorSpec, shape: Shape) -> TensorSpec:
    """A spec with another shape, its dimensions in the order in memory that they have.

    Raises:
        InputError: its items do not lie one after the other, and more than the outermost grows.
    """
    if shape == spec.shape:
        return spec
    if spec.strides == contiguous(spec.shape):
        return replace(spec, shape=shape, strides=contiguous(shape))
    order = sorted(range(len(shape)), key=lambda i: (spec.strides[i], spec.shape[i], -i))
    real = [i for i in order if spec.shape[i] != 1 and spec.strides[i]]
    strides = [*spec.strides]
    step = now = 1
    for i in order:
        if spec.strides[i] == step:
            strides[i] = now
        elif i in real:
            if all(shape[j] == spec.shape[j] for j in real[:-1]):
                return replace(spec, shape=shape)
            raise batch_unclear(
                f"a tensor of shape {list(spec.shape)} and strides {list(spec.strides)} has gaps"
            )
        if spec.strides[i]:
            step, now = step * spec.shape[i], now * shape[i]
    return replace(spec, shape=shape, strides=tuple(strides))


def place_storages(made: Specs, shapes: tuple[Shape, ...]) -> dict[int, TensorSpec]:
    """Specs of tensors made up front, with their places in the storages that they share.

    Raises:
        InputError: a storage holds both what grows and what does not.
    """
    pairs = zip(made.items(), shapes, strict=True)
    found = {number: restride(spec, shape) for (number, spec), shape in pairs}
    members: dict[tuple[int, str], list[int]] = defaultdict(list)
    for number, spec in made.items():
        members[spec.storage, spec.dtype].append(number)
    for numbers in members.values():
        if all(found[n] == made[n] for n in numbers) or not any(made[n].offset for n in numbers):
            continue
        ratios = {
            (found[n].extent - made[n].offset) / max(made[n].extent - made[n].offset, 1)
            for n in numbers
        }
        ratio = ratios.pop()
        if ratios or ratio != int(ratio):
            raise batch_unclear("tensors that grow share their memory with others that do not")
        for n in numbers:
            found[n] = replace(found[n], offset=made[n].offset * int(ratio))
    return found


def check_scaled(before: RankProgram, after: RankProgram) -> RankProgram:
    """The scaled program, with strides as its ops give them.

    Args:
        before: the program as recorded; ops that fake tensors do not run on it are not checked.

    Raises:
        InputError: an op fails or gives other shapes than the scaled program says.
    """
    olds, news = dict(before.made), dict(after.made)
    calls = []
    with torch.no_grad(), FakeTensorMode(allow_fallback_kernels=False):
        for at, (old, new) in enumerate(zip(before.calls, after.calls, strict=True)):
            changed = any(olds.get(n) != news.get(n) for n in new.reads()) or old.specs != new.specs
            if changed and not new.op.startswith(FOREIGN) and new.op not in IDLE:
                new = _check_call(at, old, new, olds, news)
            calls.append(new)
            olds.update(number_outputs(old.outputs, old.specs))
            news.update(number_outputs(new.outputs, new.specs))
    return replace(after, calls=calls)


def _check_call(at: int, old: Call, new: Call, olds: Specs, news: Specs) -> Call:
    op = find_op(new.op, new.overload)
    if op is None:
        return new
    try:
        base = _outputs(op, old, olds)
    except FAILS:
        return new
    if not _alike(base, old.specs):
        return new
    where = f"op {at}, {new.op}, does not run at the sizes that follow from one trace"
    try:
        made = _outputs(op, new, news)
    except FAILS as error:
        first = str(error).split("\n")[0][:120]
        raise batch_unclear(f"{where}: {first}") from error
    if not _alike(made, new.specs):
        raise batch_unclear(f"{where}: it gives other shapes than what follows takes")
    specs = zip(new.specs, old.specs, base, made, strict=False)
    return replace(new, specs=tuple(nested(_with_strides, *of) for of in specs))


def _outputs(op: Any, call: Call, specs: Specs) -> tuple[Any, ...]:
    """What a call gives on fake tensors."""

    def fake(number: int) -> torch.Tensor:
        spec = specs[number]
        return torch.empty_strided(spec.shape, spec.strides, dtype=getattr(torch, spec.dtype))

    output = run(op, call, fake)
    listed = isinstance(output, (tuple, list))
    one = len(call.specs) == 1 and (not listed or isinstance(call.specs[0], tuple))
    return (output,) if one or not listed else tuple(output)


def _alike(outputs: Any, specs: Any) -> bool:
    if specs is None:
        return True
    if isinstance(specs, TensorSpec):
        return isinstance(outputs, torch.Tensor) and tuple(outputs.shape) == specs.shape
    if outputs is None or isinstance(outputs, torch.Tensor):
        return not specs
    return len(outputs) >= len(specs) and all(map(_alike, outputs, specs))


def _with_strides(new: Any, old: Any, base: Any, made: Any) -> Any:
    """Strides as the op gives them, where it gave the recorded ones."""
    if new is None or tuple(base.stride()) != old.strides:
        return new
    # where the tensor begins in its storage
    offset = made.storage_offset() if old.offset == base.storage_offset() else old.offset
    return replace(new, strides=tuple(made.stride()), offset=int(offset))
