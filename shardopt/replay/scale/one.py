"""A program at another batch size, out of one trace of it. The spine.

Sizes become symbols (`walk`), the symbols that are the batch's are separated from the rest
(`decide`), and what comes out is run again on fake tensors, op by op (`check`).
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
    Number,
    RankProgram,
    Slot,
    TensorSpec,
    Term,
    nested,
    number_outputs,
    slots,
)
from shardopt.replay.program.schema import find_op
from shardopt.replay.program.tables import MatchedTables
from shardopt.replay.program.tensors import contiguous
from shardopt.replay.program.values import fills_of, is_lookup
from shardopt.replay.scale.decide import Symbols, decide_growth, grow
from shardopt.replay.scale.sizes import UndecidedError, batch_unclear
from shardopt.replay.scale.walk import BAGS, FAILS, IDLE, SymbolicProgram, run, walk_program

DIVISIONS = frozenset({"aten::div", "aten::div_"})


def scale_alone(
    program: RankProgram,
    times: int,
    given: int | None = None,
    tables: MatchedTables | None = None,
) -> RankProgram:
    """The program at `times` the batch of its trace; recorded times are dropped.

    Args:
        given: samples of a rank in the trace, where its lookups do not tell.
        tables: that its lookups read, where a summary of them is given.

    Raises:
        InputError: the trace does not tell which sizes are the batch's; lists the ops.
    """
    samples = samples_of(program, given)
    if times == 1:
        return program
    try:
        walk = walk_program(program, samples)
    except UndecidedError as error:
        raise batch_unclear(str(error)) from error
    known = decide_growth(walk, program)
    made = _Scaled(walk, program, known, times).run()
    before, after = (_restore_transposes(of, walk.transposes.found) for of in (program, made))
    after = check_scaled(before, after)
    return replace(after, fills=fills_of(after, tables))


class _Scaled:
    def __init__(
        self, walk: SymbolicProgram, program: RankProgram, known: Symbols, times: int
    ) -> None:
        self.walk, self.program, self.known, self.times = walk, program, known, times
        self.specs = program.specs()

    def run(self) -> RankProgram:
        """The program with numbers for symbols."""
        shapes = {n: self._shape(shape) for n, shape in self.walk.made.items()}
        now = place_storages(self.program.made, shapes)
        made = dict(now)
        calls = []
        for call, of, outputs in zip(
            self.program.calls, self.walk.calls, self.walk.shapes, strict=True
        ):
            calls.append(self._call(call, of, outputs, now))
            now.update(number_outputs(call.outputs, calls[-1].specs))
        return replace(self.program, calls=calls, made=made)

    def _call(
        self, call: Call, of: Call, outputs: tuple[Any, ...], now: dict[int, TensorSpec]
    ) -> Call:
        if call.op == "wait":
            return call
        arguments = nested(self._term, of.arguments)
        if call.op in DIVISIONS:
            arguments = self._divide(arguments, now)
        given = (*outputs, *[None] * (len(call.specs) - len(outputs)))
        return replace(
            call,
            arguments=arguments,
            keywords={name: nested(self._term, term) for name, term in of.keywords.items()},
            specs=nested(self._spec, call.specs, given),
            bytes=None if call.bytes is None else self._bytes(call, now),
            us=None,
        )

    def _shape(self, shape: Any) -> tuple[int, ...]:
        return tuple(grow(self.walk, self.known, size, self.times) for size in shape)

    def _term(self, term: Term) -> Term:
        if isinstance(term, Number) and not isinstance(term.value, (bool, int, float)):
            return Number(grow(self.walk, self.known, term.value, self.times))
        return term

    def _divide(self, terms: tuple[Term, ...], now: dict[int, TensorSpec]) -> tuple[Term, ...]:
        """A mean's gradient is divided by as many numbers as the mean is of."""
        number = slots(terms[0])[0]
        by = terms[1]
        before, after = (prod(of[number].shape) for of in (self.specs, now))
        if isinstance(by, Number) and before > 1 and by.value == before:
            return (terms[0], Number(type(by.value)(after)), *terms[2:])
        return terms

    def _spec(self, spec: Any, shape: Any) -> Any:
        if spec is None or shape is None:
            return spec
        return restride(spec, self._shape(shape))

    def _bytes(self, call: Call, now: dict[int, TensorSpec]) -> int:
        """Of what a rank gives to a collective."""
        assert call.bytes is not None
        sent = [
            number
            for name, term in call.named().items()
            if name in SENT and call.collective not in RECEIVED
            for number in slots(term)
        ]
        before, after = (
            sum(prod(of[n].shape) * item_bytes(of[n].dtype) for n in sent)
            for of in (self.specs, now)
        )
        return call.bytes if not before else call.bytes * after // before


LENGTHS = "fbgemm::permute_2D_sparse_data"
"""Takes a row of lengths a feature, with one of each sample."""


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


def _pools(call: Call, rows: int, program: RankProgram, specs: Mapping[int, TensorSpec]) -> bool:
    """Whether a lookup of FBGEMM gives a row a bag: its offsets, behind its ids, have that many."""
    if not is_lookup(call.op) or "backward" in call.op:
        return False
    slots = [term.number for term in call.arguments if isinstance(term, Slot)]
    kinds = [program.fills.get(n, {}).get("kind") for n in slots]
    if "table_ids" not in kinds[:-1]:
        return False
    offsets = specs.get(slots[kinds.index("table_ids") + 1])
    return offsets is not None and bool(rows) and (offsets.shape[0] - 1) % rows == 0


Shape = tuple[int, ...]


def item_bytes(dtype: str) -> int:
    """Of an item of a tensor."""
    return int(getattr(torch, dtype).itemsize)


def restride(spec: TensorSpec, shape: Shape) -> TensorSpec:
    """A spec with another shape, its dimensions in the order in memory that they have.

    Raises:
        InputError: its items do not lie one after the other, and more than the outermost grows.
    """
    if shape == spec.shape:
        return spec
    strides = _strides(spec, shape)
    if strides is None:
        raise batch_unclear(
            f"a tensor of shape {list(spec.shape)} and strides {list(spec.strides)} has gaps"
        )
    return replace(spec, shape=shape, strides=strides)


def _strides(spec: TensorSpec, shape: Shape) -> Shape | None:
    if spec.strides == contiguous(spec.shape):
        return contiguous(shape)
    order = sorted(range(len(shape)), key=lambda i: (-spec.strides[i], -spec.shape[i], i))
    real = [i for i in order if spec.shape[i] != 1 and spec.strides[i] != 0]
    dense = tuple(spec.shape[i] for i in real)
    kept = [i for i in range(len(shape)) if i not in real]
    if tuple(spec.strides[i] for i in real) == contiguous(dense):
        made = dict(zip(real, contiguous(tuple(shape[i] for i in real)), strict=True))
        old = {spec.strides[i]: made[i] for i in reversed(real)}
        old |= {spec.strides[i] * spec.shape[i]: made[i] * shape[i] for i in real[:1]}
        for i in kept:
            made[i] = old.get(spec.strides[i], spec.strides[i])
        return tuple(made[i] for i in range(len(shape)))
    if all(shape[i] == spec.shape[i] for i in real[1:]):
        return spec.strides
    return None


def place_storages(
    made: Mapping[int, TensorSpec], shapes: Mapping[int, Shape]
) -> dict[int, TensorSpec]:
    """Specs of tensors made up front, with their places in the storages that they share.

    Raises:
        InputError: a storage holds both what grows and what does not.
    """
    members: dict[tuple[int, str], list[int]] = defaultdict(list)
    for number, spec in made.items():
        members[spec.storage, spec.dtype].append(number)
    found: dict[int, TensorSpec] = {}
    for numbers in members.values():
        found |= _place({n: made[n] for n in numbers}, shapes)
    return {number: found[number] for number in made}


def _place(specs: Mapping[int, TensorSpec], shapes: Mapping[int, Shape]) -> dict[int, TensorSpec]:
    made = {number: restride(spec, shapes[number]) for number, spec in specs.items()}
    if all(made[n] == spec for n, spec in specs.items()) or not any(
        spec.offset for spec in specs.values()
    ):
        return made
    ratios = {
        (made[n].extent - made[n].offset) / max(spec.extent - spec.offset, 1)
        for n, spec in specs.items()
    }
    ratio = ratios.pop()
    if ratios or ratio != int(ratio):
        raise batch_unclear("tensors that grow share their memory with others that do not")
    return {n: replace(spec, offset=spec.offset * int(ratio)) for n, spec in made.items()}


FOREIGN = ("wait", "backward of ", "c10d::", "fbgemm::")
"""Calls that fake tensors know nothing of."""
Specs = Mapping[int, TensorSpec]


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
        base = _outputs(run(op, old, lambda n: _fake(olds, n)), old)
    except FAILS:
        return new
    if not _alike(base, old.specs):
        return new
    try:
        made = _outputs(run(op, new, lambda n: _fake(news, n)), new)
    except FAILS as error:
        raise _refusal(at, new, str(error).split("\n")[0][:120]) from error
    if not _alike(made, new.specs):
        raise _refusal(at, new, "it gives other shapes than what follows takes")
    specs = zip(new.specs, old.specs, base, made, strict=False)
    return replace(new, specs=tuple(nested(_with_strides, *of) for of in specs))


def _refusal(at: int, call: Call, why: str) -> InputError:
    return batch_unclear(
        f"op {at}, {call.op}, does not run at the sizes that follow from one trace: {why}"
    )


def _fake(specs: Specs, number: int) -> torch.Tensor:
    spec = specs[number]
    return torch.empty_strided(spec.shape, spec.strides, dtype=getattr(torch, spec.dtype))


def _outputs(output: Any, call: Call) -> tuple[Any, ...]:
    listed = isinstance(output, (tuple, list))
    one = len(call.specs) == 1 and not (listed and not isinstance(call.specs[0], tuple))
    return (output,) if one else tuple(output) if listed else (output,)


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


def _restore_transposes(
    program: RankProgram, found: Mapping[int, list[tuple[int, int]]]
) -> RankProgram:
    """The program with numbers for the transposes that ops read."""
    calls = list(program.calls)
    last = max(program.numbers())
    for at, pairs in found.items():
        for transpose, number in pairs:
            last += 1
            calls[transpose] = replace(calls[transpose], outputs=(last,))
            reader = calls[at]
            turned = reader.renumber({number: last})
            frees = (*reader.frees, last)
            calls[at] = replace(turned, outputs=reader.outputs, frees=frees)
    return replace(program, calls=calls)
