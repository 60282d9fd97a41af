"""More embedding modules: the sparse part of programs several times, each on its own tensors.

What a model with more embedding collections beside the first would run, but that the dense part
reads the first alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from predictor.errors import InputError
from shardopt.replay.program.program import Call, Number, RankProgram, Slot, Term
from shardopt.replay.scale.sparse_slice import SparseSlice

LISTED = 5
Nth = tuple[tuple[int, ...], int]
"""A collective: the ranks of its group, and its place among the group's."""


def repeat_tables(programs: Sequence[RankProgram], times: int) -> list[RankProgram]:
    """Programs of all ranks with `times` embedding modules in the place of each.

    A copy of a call comes right after it, in the same order on all ranks. Tables of the dense
    optimizer are looked up as often, but their gradients are those of the first.

    Raises:
        InputError: there are no lookups, or the traces do not tell what belongs to them.
    """
    slices = [SparseSlice(program) for program in programs]
    if not any(of.lookups for of in slices):
        raise InputError(
            "tables cannot be added: the traces have no lookup of embeddings (of FBGEMM, "
            "aten::embedding or aten::embedding_bag)",
            inputs=("scale",),
        )
    slices = _agree(slices)
    problems = {
        f"rank {of.program.rank}: {problem}": None for of in slices for problem in of.problems
    }
    if problems:
        raise InputError(
            f"tables cannot be added: the traces do not tell what belongs to the lookups; "
            f"{len(problems)} reasons: {'; '.join(list(problems)[:LISTED])}",
            inputs=("scale",),
        )
    return [_repeat(of, times) for of in slices]


def _agree(slices: Sequence[SparseSlice]) -> list[SparseSlice]:
    """A rank without tables runs the collectives of those that have some."""
    orders = [_order(of.program) for of in slices]
    sparse = {
        nth
        for of, order in zip(slices, orders, strict=True)
        for at, nth in order.items()
        if at in of.collectives
    }
    found = []
    for of, order in zip(slices, orders, strict=True):
        also = {at for at, nth in order.items() if nth in sparse and at not in of.calls}
        found.append(SparseSlice(of.program, also) if also else of)
    return found


def _order(program: RankProgram) -> dict[int, Nth]:
    counts: dict[tuple[int, ...], int] = defaultdict(int)
    found = {}
    for at, call in enumerate(program.calls):
        group = call.keywords.get("group")
        if call.is_collective and isinstance(group, Number):
            ranks = program.groups[int(group.value)]
            found[at] = (ranks, counts[ranks])
            counts[ranks] += 1
    return found


def _repeat(of: SparseSlice, times: int) -> RankProgram:
    program = of.program
    copies = [_Copy(of, nth) for nth in range(1, times)]
    own = {n for at in of.calls for n in program.calls[at].gives()}
    calls: list[Call] = []
    moved: dict[int, list[int]] = {}
    for at, call in enumerate(program.calls):
        if call.op == "wait":
            target = call.arguments[0]
            assert isinstance(target, Number)
            for place in moved[int(target.value)]:
                calls.append(replace(call, arguments=(Number(place),)))
            continue
        same = [call]
        if at in of.calls:
            same = [call, *(copy.call(at) for copy in copies)]
            _free_last(same, own)
        moved[at] = list(range(len(calls), len(calls) + len(same)))
        calls += same
    made, fills = dict(program.made), dict(program.fills)
    for copy in copies:
        made |= copy.made
        fills |= copy.fills
    return replace(program, calls=calls, made=made, fills=fills)


def _free_last(same: list[Call], own: set[int]) -> None:
    """Free what the copies share with the first only after the last of them."""
    shared = [n for n in same[0].frees if n not in own]
    if shared:
        same[0] = replace(same[0], frees=tuple(n for n in same[0].frees if n in own))
        same[-1] = replace(same[-1], frees=(*same[-1].frees, *shared))


class _Copy:
    """The numbers of one more embedding module.

    Args:
        nth: of the copies, from 1.
    """

    def __init__(self, of: SparseSlice, nth: int) -> None:
        program, calls = of.program, of.program.calls
        self.program = program
        own = [n for at in sorted(of.calls) for n in calls[at].gives()]
        read = {n for at in of.calls for n in calls[at].reads() if n in program.made}
        every = [*program.made, *(n for c in calls for n in (*c.reads(), *c.gives()))]
        per_copy = len(own) + len(read)
        start = 1 + max(every, default=-1) + (nth - 1) * per_copy
        self.numbers = {n: start + i for i, n in enumerate([*own, *sorted(read)])}
        stores = 1 + max((spec.storage for spec in program.made.values()), default=-1)
        self.made = {
            self.numbers[n]: replace(
                program.made[n], storage=program.made[n].storage + nth * stores
            )
            for n in sorted(read)
        }
        self.fills = {self.numbers[n]: program.fills[n] for n in sorted(read) if n in program.fills}
        self.last: dict[int, int] = {}
        for at in sorted(of.calls):
            for n in (*calls[at].reads(), *calls[at].gives()):
                self.last[n] = at

    def call(self, at: int) -> Call:
        """The copy of a call."""
        call = self.program.calls[at]
        touched = dict.fromkeys((*call.reads(), *call.gives()))
        return replace(
            call,
            arguments=tuple(_rename(term, self.numbers) for term in call.arguments),
            keywords={k: _rename(term, self.numbers) for k, term in call.keywords.items()},
            outputs=tuple(_outputs(output, self.numbers) for output in call.outputs),
            frees=tuple(
                self.numbers[n]
                for n in touched
                if n in self.numbers and n not in self.program.made and self.last[n] == at
            ),
        )


def _rename(term: Term, numbers: Mapping[int, int]) -> Term:
    if isinstance(term, Slot):
        return Slot(numbers.get(term.number, term.number))
    if isinstance(term, tuple):
        return tuple(_rename(item, numbers) for item in term)
    return term


def _outputs(output: Any, numbers: Mapping[int, int]) -> Any:
    if isinstance(output, tuple):
        return tuple(_outputs(item, numbers) for item in output)
    return None if output is None else numbers[output]
