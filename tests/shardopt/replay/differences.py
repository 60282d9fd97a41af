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
        known = isinstance(spec, TensorSpec)
        return (spec.shape, spec.strides, spec.dtype) if known else repr(spec)

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
    left, right = list(map(repr, first)), list(map(repr, second))
    matcher = SequenceMatcher(None, left, right, autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag != "equal":
            yield f"{tag} at {a}: {left[a:b][:LISTED]} -> {right[c:d][:LISTED]}"


def check_runs(of: RankProgram) -> None:
    """Each tensor that a call reads is there, whatever calls give is let go of once at most, and
    each collective is waited for."""
    live, waited = set(of.made), []
    gone: set[int] = set()
    started = 0
    for call in of.calls:
        assert live >= set(call.reads()), call
        assert not live & set(call.gives()), call
        live.update(call.gives())
        assert not gone & set(call.frees)
        live -= set(call.frees)
        gone |= set(call.frees)
        started += call.is_collective
        assert all(nth < started for nth in call.waits)
        waited += call.waits
    assert sorted(waited) == [*range(started)]
    assert set(of.fills) <= set(of.made)


def check_equal(made: RankProgram, whole: RankProgram) -> None:
    """A scaled program is one that was captured: calls, tensors made up front, what these hold."""
    found = list(differences(signatures(made), signatures(whole)))
    assert not found, "\n".join(found)
    specs = [{n: replace(s, storage=0) for n, s in of.made.items()} for of in (made, whole)]
    assert specs[0] == specs[1]
    assert fills_of(made) == whole.fills
    assert all(call.us is None for call in made.calls)
