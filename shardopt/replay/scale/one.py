"""A program at another batch size, out of one trace of it. The spine.

Sizes become symbols (`walk`), the symbols that are the batch's are separated from the rest
(`decide`), and what comes out is run again on fake tensors, op by op (`check`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from predictor.errors import InputError
from shardopt.replay.program.collectives import KNOWN, RECEIVED, SENT
from shardopt.replay.program.program import (
    Call,
    Number,
    RankProgram,
    Slot,
    TensorSpec,
    Term,
    number_outputs,
    slots,
)
from shardopt.replay.program.values import is_lookup
from shardopt.replay.scale.check import check_scaled
from shardopt.replay.scale.decide import Symbols, decide_growth, grow
from shardopt.replay.scale.fills import fills_of
from shardopt.replay.scale.sizes import UndecidedError, batch_unclear
from shardopt.replay.scale.strides import item_bytes, place_storages, restride
from shardopt.replay.scale.transposes import restore_transposes
from shardopt.replay.scale.walk import BAGS, SymbolicProgram, walk_program

DIVISIONS = frozenset({"aten::div", "aten::div_"})


def scale_alone(program: RankProgram, times: int, given: int | None = None) -> RankProgram:
    """The program at `times` the batch of its trace; recorded times are dropped.

    Args:
        given: samples of a rank in the trace, where its lookups do not tell.

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
    before, after = (restore_transposes(of, walk.transposes.found) for of in (program, made))
    after = check_scaled(before, after)
    return replace(after, fills=fills_of(before, after, times))


class _Scaled:
    def __init__(
        self, walk: SymbolicProgram, program: RankProgram, known: Symbols, times: int
    ) -> None:
        self.walk, self.program, self.known, self.times = walk, program, known, times
        self.specs = dict(program.made)
        for call in program.calls:
            self.specs.update(number_outputs(call.outputs, call.specs))

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
        arguments = tuple(self._term(term) for term in of.arguments)
        if call.op in DIVISIONS:
            arguments = self._divide(arguments, now)
        given = (*outputs, *[None] * (len(call.specs) - len(outputs)))
        return replace(
            call,
            arguments=arguments,
            keywords={name: self._term(term) for name, term in of.keywords.items()},
            specs=tuple(self._spec(s, o) for s, o in zip(call.specs, given, strict=False)),
            bytes=None if call.bytes is None else self._bytes(call, now),
            us=None,
        )

    def _shape(self, shape: Any) -> tuple[int, ...]:
        return tuple(grow(self.walk, self.known, size, self.times) for size in shape)

    def _term(self, term: Term) -> Term:
        if isinstance(term, tuple):
            return tuple(self._term(item) for item in term)
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
        if isinstance(spec, tuple):
            shapes = shape if shape is not None else [None] * len(spec)
            return tuple(self._spec(s, o) for s, o in zip(spec, shapes, strict=True))
        if spec is None or shape is None:
            return spec
        return restride(spec, self._shape(shape))

    def _bytes(self, call: Call, now: dict[int, TensorSpec]) -> int:
        """Of what a rank gives to a collective."""
        assert call.bytes is not None
        names = KNOWN.get(call.collective, ())
        sent = [
            number
            for name, term in zip(names, call.arguments, strict=False)
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
    specs: dict[int, TensorSpec] = dict(program.made)
    for call in program.calls:
        specs.update(number_outputs(call.outputs, call.specs))
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
