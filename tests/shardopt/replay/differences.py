"""Holds a replay's graph against the trace that it was made from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from typing import Any

from shardopt.replay.program.program import RankProgram, Slot, Term

Signature = tuple[Any, ...]
LISTED = 5


def signatures(program: RankProgram) -> list[Signature]:
    """Op, shapes, strides and types of what each call takes and gives, and a collective's bytes."""
    specs = dict(program.made)
    found = []
    for call in program.calls:
        if call.op == "wait":
            continue
        outputs = tuple(_spec(spec) for spec in call.specs)
        for number, spec in zip(call.gives(), _numbered(call.outputs, call.specs), strict=False):
            if spec is not None:
                specs[number] = spec
        terms = (*call.arguments, *call.keywords.values())
        inputs = tuple(_term(term, specs) for term in terms)
        found.append((call.op, call.overload, inputs, outputs, call.bytes))
    return found


def differences(first: Sequence[Any], second: Sequence[Any]) -> Iterator[str]:
    """In words, what one graph has and the other does not; nothing if they are the same."""
    if list(first) == list(second):
        return
    left, right = list(map(repr, first)), list(map(repr, second))
    matcher = SequenceMatcher(None, left, right, autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag != "equal":
            yield f"{tag} at {a}: {left[a:b][:LISTED]} -> {right[c:d][:LISTED]}"


def _term(term: Term, specs: dict[int, Any]) -> Any:
    if isinstance(term, Slot):
        spec = specs.get(term.number)
        return _spec(spec) if spec is not None else "tensor"
    if isinstance(term, tuple):
        return tuple(_term(item, specs) for item in term)
    return repr(term)


def _spec(spec: Any) -> Any:
    if isinstance(spec, tuple):
        return tuple(_spec(item) for item in spec)
    return None if spec is None else (spec.shape, spec.strides, spec.dtype)


def _numbered(outputs: Any, specs: Any) -> Iterator[Any]:
    """Specs of the outputs that have numbers, in the order of the numbers."""
    for output, spec in zip(outputs, specs, strict=False):
        if isinstance(output, tuple):
            yield from _numbered(output, spec if isinstance(spec, tuple) else ())
        elif output is not None:
            yield spec
