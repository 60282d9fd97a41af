"""Programs of several traces one after the other, as one program a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from predictor.errors import InputError
from shardopt.replay.program.program import Call, Number, RankProgram, Slot, Term


def join_jobs(jobs: Sequence[Sequence[RankProgram]]) -> list[RankProgram]:
    """One program a rank that runs the jobs' programs in their order.

    Tensors of one job are none of another's.

    Raises:
        InputError: the jobs have unlike ranks.
    """
    ranks = [[program.rank for program in job] for job in jobs]
    for other in ranks[1:]:
        if other != ranks[0]:
            raise InputError(
                f"one trace has ranks {ranks[0]}, another {other}; join traces of jobs with "
                "the same ranks",
                inputs=("join",),
            )
    return [_concatenate(of_rank) for of_rank in zip(*jobs, strict=True)]


def _concatenate(programs: Sequence[RankProgram]) -> RankProgram:
    whole = RankProgram(programs[0].rank, [], {}, {}, [], [], [()])
    for program in programs:
        whole = _append(whole, program)
    return whole


def _append(whole: RankProgram, program: RankProgram) -> RankProgram:
    numbers = 1 + max(_numbers(whole), default=-1)
    stores = 1 + max((spec.storage for spec in whole.made.values()), default=-1)
    groups = [*whole.groups, *(group for group in program.groups if group not in whole.groups)]
    places = [groups.index(group) for group in program.groups]
    calls = [_move_call(call, numbers, len(whole.calls), places) for call in program.calls]
    made = {
        number + numbers: replace(spec, storage=spec.storage + stores)
        for number, spec in program.made.items()
    }
    fills = {number + numbers: fill for number, fill in program.fills.items()}
    return RankProgram(
        whole.rank,
        [*whole.calls, *calls],
        {**whole.made, **made},
        {**whole.fills, **fills},
        [*whole.left_out, *program.left_out],
        [*whole.notes, *program.notes],
        groups,
    )


def _numbers(program: RankProgram) -> list[int]:
    used = [n for call in program.calls for n in (*call.reads(), *call.gives())]
    return [*used, *program.made]


def _move_call(call: Call, numbers: int, before: int, groups: Sequence[int]) -> Call:
    """The call with its tensors, its place and its group as the whole program numbers them."""
    if call.op == "wait":
        target = call.arguments[0]
        assert isinstance(target, Number)
        return replace(call, arguments=(Number(int(target.value) + before),))
    keywords = {name: _shift(term, numbers) for name, term in call.keywords.items()}
    group = call.keywords.get("group")
    if call.is_collective and isinstance(group, Number):
        keywords["group"] = Number(groups[int(group.value)])
    return replace(
        call,
        arguments=tuple(_shift(term, numbers) for term in call.arguments),
        keywords=keywords,
        outputs=tuple(_renumber(output, numbers) for output in call.outputs),
        frees=tuple(number + numbers for number in call.frees),
    )


def _shift(term: Term, by: int) -> Term:
    if isinstance(term, Slot):
        return Slot(term.number + by)
    if isinstance(term, tuple):
        return tuple(_shift(item, by) for item in term)
    return term


def _renumber(output: Any, by: int) -> Any:
    if isinstance(output, tuple):
        return tuple(_renumber(item, by) for item in output)
    return None if output is None else output + by
