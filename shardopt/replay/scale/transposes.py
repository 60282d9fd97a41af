"""Transposes of square matrices, which traces without strides do not tell from what they transpose.

Where the batch is as large as a width, a gradient of both is square: the program then reads it in
place of its transpose. At another batch that matters. The op after a transpose reads the transpose
where it fits better: where fewer sizes must be equal that need not be otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardopt.replay.program.program import Call, RankProgram, Slot, Term
from shardopt.replay.scale.ops import op_of, run
from shardopt.replay.scale.sizes import Shape, Sizes

TRANSPOSES = frozenset({"aten::t", "aten::transpose", "aten::numpy_T", "aten::mT"})


class Transposes:
    """Transposes whose output the program does not name, until the next op that reads the matrix.

    `found` maps the position of an op that reads one to the positions of the transpose and the
    number of the matrix.
    """

    def __init__(self) -> None:
        self.open: dict[int, int] = {}
        self.found: dict[int, list[tuple[int, int]]] = {}

    def note(self, at: int, call: Call, sizes: Sizes, shapes: Mapping[int, Shape]) -> None:
        """Remember a transpose of a square matrix."""
        first = call.arguments[0] if call.arguments else None
        if call.op not in TRANSPOSES or not isinstance(first, Slot) or any(call.gives()):
            return
        shape = shapes[first.number]
        hints = [sizes.hint(size) for size in shape]
        if len(shape) == 2 and hints[0] == hints[1] and len(set(map(sizes.expression, shape))) == 2:
            self.open[first.number] = at

    def read(self, at: int, call: Call, sizes: Sizes, shapes: Mapping[int, Shape]) -> set[int]:
        """Numbers of the matrices whose transposes an op reads."""
        chosen = set()
        for number in set(call.reads()) & self.open.keys():
            transpose = self.open.pop(number)
            plain, turned = (
                _count_merged(call, sizes, shapes, number, turn) for turn in (False, True)
            )
            if turned < plain:
                chosen.add(number)
                self.found.setdefault(at, []).append((transpose, number))
        return chosen


def _count_merged(
    call: Call, sizes: Sizes, shapes: Mapping[int, Shape], number: int, turn: bool
) -> int:
    """How many sizes that differ so far an op takes for equal."""
    trial = Sizes(1)
    symbols: dict[Any, Any] = {}

    def size(of: Any) -> Any:
        expression = sizes.expression(of)
        if expression.is_number:
            return int(expression)
        if expression not in symbols:
            symbols[expression] = trial.fresh(sizes.hint(of))
        return symbols[expression]

    def tensor(n: int) -> torch.Tensor:
        made = torch.empty([size(s) for s in shapes[n]])
        return made.t() if n == number and turn else made

    op = op_of(call)
    try:
        with FakeTensorMode(allow_fallback_kernels=False, shape_env=trial.env), torch.no_grad():
            run(op, call, tensor)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return len(symbols) + 1
    return len(symbols) - len({trial.expression(s) for s in symbols.values()} - _numbers(trial))


def _numbers(trial: Sizes) -> set[Any]:
    """What stands for a symbol and is a number."""
    return {made for symbol in trial.hints if (made := trial.env.simplify(symbol)).is_number}


def restore_transposes(
    program: RankProgram, found: Mapping[int, list[tuple[int, int]]]
) -> RankProgram:
    """The program with numbers for the transposes that ops read."""
    calls = list(program.calls)
    last = max([n for call in calls for n in (*call.reads(), *call.gives())] + list(program.made))
    for at, pairs in found.items():
        for transpose, number in pairs:
            last += 1
            calls[transpose] = replace(calls[transpose], outputs=(last,))
            reader = calls[at]
            calls[at] = replace(
                reader,
                arguments=tuple(_rename(t, number, last) for t in reader.arguments),
                keywords={k: _rename(t, number, last) for k, t in reader.keywords.items()},
                frees=(*reader.frees, last),
            )
    return replace(program, calls=calls)


def _rename(term: Term, old: int, new: int) -> Term:
    if isinstance(term, tuple):
        return tuple(_rename(item, old, new) for item in term)
    return Slot(new) if term == Slot(old) else term
