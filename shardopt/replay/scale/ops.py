"""Runs calls of a program through PyTorch's dispatcher, with tensors and sizes as given."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from shardopt.replay.program.program import Call, Number, Slot, Term, Word
from shardopt.replay.scale.sizes import Sizes, UndecidedError

SIZES = frozenset(
    {
        "size", "sizes", "shape", "self_sizes", "self_size", "input_sizes", "input_size",
        "normalized_shape", "num_weights", "output_size", "sym_size", "N", "C", "HxW",
    }
)  # fmt: skip
"""Arguments of ops that are sizes of tensors."""
COUNTED = frozenset({"aten::arange"})
"""Ops whose whole-number scalars are sizes."""
PLACES = {"device": "cpu", "cpu": "cpu"}


def op_of(call: Call) -> Any:
    """The op of a call; None if it is not installed."""
    space, _, name = call.op.partition("::")
    try:
        return getattr(getattr(getattr(torch.ops, space), name), call.overload)
    except (AttributeError, RuntimeError):
        return None


def with_symbols(call: Call, op: Any, sizes: Sizes) -> Call:
    """The call with a symbol for each of its numbers that is the size of a tensor."""
    names = [argument.name for argument in op._schema.arguments]
    counted = call.op in COUNTED

    def term_of(name: str, term: Term) -> Term:
        if name in SIZES or (counted and name in ("start", "end")):
            return _each(term, sizes, alone=not isinstance(term, tuple) or len(term) == 1)
        return term

    arguments = [term_of(*pair) for pair in zip(names, call.arguments, strict=False)]
    if {"size", "stride"} <= set(names):
        at, to = names.index("size"), names.index("stride")
        arguments[to] = _strides(arguments[at], call.arguments[at], call.arguments[to])
    return replace(
        call,
        arguments=tuple(arguments),
        keywords={name: term_of(name, term) for name, term in call.keywords.items()},
    )


def _strides(sizes: Term, recorded: Term, strides: Term) -> Term:
    """Strides of a tensor without gaps, in the order of its dimensions in memory.

    Raises:
        UndecidedError: it has gaps.
    """
    shape, steps = (tuple(value_of(term, _no_tensor)) for term in (recorded, strides))
    order = sorted(range(len(shape)), key=lambda i: (steps[i], shape[i], -i))
    made: dict[int, Any] = {}
    step, now = 1, 1
    for i in order:
        if steps[i] != step:
            raise UndecidedError("an op makes a tensor with gaps")
        made[i] = Number(now)
        step, now = step * shape[i], now * value_of(sizes, _no_tensor)[i]
    return tuple(made[i] for i in range(len(shape)))


def _no_tensor(number: int) -> Any:
    raise UndecidedError(f"tensor {number} stands for a size")


def _each(term: Term, sizes: Sizes, *, alone: bool) -> Term:
    if isinstance(term, tuple):
        return tuple(_each(item, sizes, alone=alone) for item in term)
    if isinstance(term, Number) and type(term.value) is int:
        return Number(sizes.fresh(term.value, ids=alone))
    return term


def run(op: Any, call: Call, tensor: Callable[[int], Any]) -> Any:
    """What an op gives.

    Args:
        tensor: of a number.
    """
    arguments = [value_of(term, tensor) for term in call.arguments]
    keywords = {name: value_of(term, tensor) for name, term in call.keywords.items()}
    return op(*arguments, **keywords)


def value_of(term: Term, tensor: Callable[[int], Any]) -> Any:
    """What a term stands for."""
    if isinstance(term, Slot):
        return tensor(term.number)
    if isinstance(term, Number):
        return term.value
    if isinstance(term, tuple):
        return [value_of(item, tensor) for item in term]
    if isinstance(term, Word):
        return _word(term.text)
    return None


def _word(text: str) -> Any:
    if text in PLACES:
        return torch.device(PLACES[text])
    if text.startswith("torch."):
        return getattr(torch, text.removeprefix("torch."))
    if text.startswith("float("):
        return float(text[7:-2])
    return ast.literal_eval(text)


def written_tensors(call: Call, op: Any) -> list[int]:
    """Numbers of the tensors that an op changes in place."""
    found = []
    for argument, term in zip(op._schema.arguments, call.arguments, strict=False):
        if argument.is_write:
            found += numbers(term)
    return found


def numbers(term: Term) -> list[int]:
    """Numbers of the tensors in a term."""
    if isinstance(term, Slot):
        return [term.number]
    return [n for item in term for n in numbers(item)] if isinstance(term, tuple) else []
