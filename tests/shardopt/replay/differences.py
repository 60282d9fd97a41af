"""Holds a replay's graph against the trace that it was made from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any

from shardopt.replay.program.program import RankProgram, Slot, TensorSpec, nested
from shardopt.replay.program.values import fills_of

Signature = tuple[Any, ...]
LISTED = 5


def signatures(program: RankProgram) -> list[Signature]:
    """Op, shapes, strides and types of what each call takes and gives, and a collective's bytes."""
    specs = program.specs()

    def of(leaf: Any) -> Any:
        spec = specs.get(leaf.number, "tensor") if isinstance(leaf, Slot) else leaf
        is_tensor = isinstance(spec, TensorSpec)
        return (spec.shape, spec.strides, spec.dtype) if is_tensor else repr(spec)

    return [
        (
            call.op,
            call.overload,
            nested(of, (*call.arguments, *call.keywords.values())),
            nested(of, call.specs),
            call.bytes,
        )
        for call in program.calls
    ]


def differences(first: Sequence[Any], second: Sequence[Any]) -> Iterator[str]:
    """In words, what one graph has and the other does not; nothing if they are the same."""
    if list(first) == list(second):
        return
    from_lines, to_lines = list(map(repr, first)), list(map(repr, second))
    matcher = SequenceMatcher(None, from_lines, to_lines, autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag != "equal":
            yield f"{tag} at {a}: {from_lines[a:b][:LISTED]} -> {to_lines[c:d][:LISTED]}"


def check_runs(program: RankProgram) -> None:
    """Each tensor that a call reads is there, whatever calls give is let go of once at most, and
    each collective is waited for."""
    live, waited = set(program.made), []
    freed: set[int] = set()
    started = 0
    for call in program.calls:
        assert live >= set(call.reads()), call
        assert not live & set(call.gives()), call
        live.update(call.gives())
        assert not freed & set(call.frees)
        live -= set(call.frees)
        freed |= set(call.frees)
        started += call.is_collective
        assert all(nth < started for nth in call.waits)
        waited += call.waits
    assert sorted(waited) == [*range(started)]
    assert set(program.fills) <= set(program.made)


def check_equal(program: RankProgram, expected: RankProgram) -> None:
    """A scaled program is one that was captured: calls, tensors made up front, what these hold."""
    changes = list(differences(signatures(program), signatures(expected)))
    assert not changes, "\n".join(changes)
    specs = [
        {n: replace(s, storage=0) for n, s in each.made.items()} for each in (program, expected)
    ]
    assert specs[0] == specs[1]
    assert fills_of(program) == expected.fills
    assert all(call.us is None for call in program.calls)
