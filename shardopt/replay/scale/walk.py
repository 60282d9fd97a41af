"""Walks a program with symbols for sizes: which size follows from which.

Ops run under PyTorch's fake tensors on symbolic sizes; those that have plain numbers for sizes, or
no fake kernel, follow `rules`. Parameters and what else an optimizer writes keep their sizes.

Why: docs/decisions/0028-plans-from-the-bound.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardopt.replay.program.program import (
    WHOLE,
    Call,
    Number,
    RankProgram,
    Slot,
    TensorSpec,
    Term,
    Word,
    leaves,
    nested,
    number_outputs,
    slots,
)
from shardopt.replay.program.schema import find_op, word_value
from shardopt.replay.scale.rules import rule_of
from shardopt.replay.scale.sizes import KnownShapes, Shape, Sizes, UndecidedError, shapes_of

IDLE = frozenset({"aten::item", "aten::record_stream", "aten::_local_scalar_dense"})
"""Ops that give no tensor and read no more than they are given."""
BAGS = frozenset({f"aten::{n}embedding_bag{m}" for n in ("", "_") for m in ("", "_forward_only")})
"""Lookups of PyTorch that pool: ids, and a start a bag, grow with the batch."""
COPIES = frozenset({"aten::copy_", "aten::zero_", "aten::fill_", "aten::detach_"})
"""Ops that write a tensor which need not be a parameter."""
FAILS = (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError, AssertionError)


TRANSPOSES = frozenset({"aten::t", "aten::transpose", "aten::numpy_T", "aten::mT"})


class Transposes:
    """Transposes whose output the program does not name, until the next op that reads the matrix.

    Traces without strides do not tell the transpose of a square matrix from the matrix, and where
    the batch is as large as a width, a gradient of both is square. The op after a transpose reads
    the transpose where it fits better: where fewer sizes must be equal that need not be otherwise.
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

    op = find_op(call.op, call.overload)
    try:
        with FakeTensorMode(allow_fallback_kernels=False, shape_env=trial.env), torch.no_grad():
            run(op, call, tensor)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return len(symbols) + 1
    return len(symbols) - len({trial.expression(s) for s in symbols.values()} - _numbers(trial))


def _numbers(trial: Sizes) -> set[Any]:
    """What stands for a symbol and is a number."""
    return {made for symbol in trial.hints if (made := trial.env.simplify(symbol)).is_number}


@dataclass
class SymbolicProgram:
    """A program with sizes as symbols.

    Args:
        calls: with symbols in numbers of arguments.
        shapes: of each call's outputs, nested as its specs.
        made: shapes of the tensors made up front.
        fixed: of these, what keeps its sizes.
        turned: tensors that the op under way reads transposed.
    """

    sizes: Sizes
    calls: list[Call]
    shapes: list[tuple[Any, ...]]
    made: dict[int, Shape]
    fixed: frozenset[int]
    known: KnownShapes
    specs: dict[int, TensorSpec]
    transposes: Transposes = field(default_factory=Transposes)
    turned: set[int] = field(default_factory=set)


def walk_program(program: RankProgram, samples: int) -> SymbolicProgram:
    """The program with symbols for all sizes that may be the batch's.

    Raises:
        UndecidedError: sizes of the trace do not fit each other.
    """
    sizes = Sizes(samples)
    ids = frozenset(n for n, fill in program.fills.items() if fill["kind"] in ("table_ids", "ids"))
    known = KnownShapes(sizes, ids)
    fixed = fixed_tensors(program)
    for number, spec in program.made.items():
        sizes.at = f"tensor {number}"
        kept = number in fixed
        known.shapes[number] = spec.shape if kept else sizes.shape(spec.shape)
    walk = SymbolicProgram(sizes, [], [], dict(known.shapes), fixed, known, dict(program.made))
    with torch.no_grad(), FakeTensorMode(allow_fallback_kernels=False, shape_env=sizes.env):
        for at, call in enumerate(program.calls):
            sizes.begin(call.op)
            walk.turned = walk.transposes.read(at, call, sizes, known.shapes)
            try:
                changed, shapes = (call, ()) if call.op == "wait" else _call(walk, call)
            except (*FAILS, KeyError, AttributeError) as error:
                raise UndecidedError(
                    f"op {at}, {call.op}, has arguments of its own kind"
                ) from error
            walk.transposes.note(at, call, sizes, known.shapes)
            walk.calls.append(changed)
            walk.shapes.append(shapes)
            known.shapes.update(number_outputs(call.outputs, shapes))
            walk.specs.update(number_outputs(call.outputs, call.specs))
    return walk


def _call(walk: SymbolicProgram, call: Call) -> tuple[Call, tuple[Any, ...]]:
    rule = rule_of(call)
    if rule is not None:
        return rule(walk.known, call)
    if call.op in IDLE:
        return call, ()
    op = find_op(call.op, call.overload)
    if op is None:
        return call, _leave_open(walk, call)
    wanted = shapes_of(call.specs)
    made = with_symbols(call, op, walk.sizes)
    if call.op in BAGS:
        _bags(walk, call, op)
    _tie(walk, made, op)
    if not any(_symbolic(walk, term) for term in (*made.arguments, *made.keywords.values())):
        return made, wanted
    try:
        output = run(op, made, lambda number: _fake(walk, number))
    except FAILS:
        return made, _leave_open(walk, call)
    outputs = output if isinstance(output, (tuple, list)) and len(wanted) != 1 else (output,)
    found = tuple(_shape(walk, item) for item in outputs)
    if not fits(walk.sizes, found, wanted):
        return made, _leave_open(walk, call)
    return made, tuple(f if w is not None else None for f, w in zip(found, wanted, strict=False))


def _tie(walk: SymbolicProgram, call: Call, op: Any) -> None:
    """Sizes among arguments that PyTorch does not compare with the other tensors."""
    named: dict[str, Any] = call.named()
    given = call.arguments[:1]
    first = walk.known.of(given[0]) if given and isinstance(given[0], Slot) else ()
    pairs: list[tuple[Any, Any]] = []
    if "normalized_shape" in named:
        wanted = named["normalized_shape"]
        pairs = list(zip(reversed(wanted), reversed(first), strict=False))
    elif call.op == "aten::index_select_backward":
        dim = int(named["dim"].value) % len(first)
        pairs = [
            pair for i, pair in enumerate(zip(named["self_sizes"], first, strict=True)) if i != dim
        ]
    for term, size in pairs:
        walk.sizes.equal(term.value, size)


def _bags(walk: SymbolicProgram, call: Call, op: Any) -> None:
    named: dict[str, Any] = call.named()
    last = named.get("include_last_offset")
    walk.sizes.grows(walk.known.of(named["indices"])[0], ids=True)
    starts = walk.known.of(named["offsets"])[0]
    walk.sizes.grows(starts - 1 if isinstance(last, Number) and last.value else starts)


def fits(sizes: Sizes, found: Any, wanted: Any) -> bool:
    """Whether shapes are those recorded."""
    if wanted is None:
        return True
    if not isinstance(found, tuple):
        return bool(found is not None and sizes.hint(found) == wanted)
    return len(found) >= len(wanted) and all(
        fits(sizes, a, b) for a, b in zip(found, wanted, strict=False)
    )


def _fake(walk: SymbolicProgram, number: int) -> torch.Tensor:
    spec = walk.specs.get(number)
    dtype = torch.float32 if spec is None else getattr(torch, spec.dtype)
    made = torch.empty(walk.known.shapes[number], dtype=dtype)
    return made.t() if number in walk.turned else made


def _shape(walk: SymbolicProgram, output: Any) -> Any:
    if isinstance(output, (tuple, list)):
        return tuple(_shape(walk, item) for item in output)
    return walk.sizes.plain(output.shape) if isinstance(output, torch.Tensor) else None


def _leave_open(walk: SymbolicProgram, call: Call) -> Any:
    """Shapes whose sizes nothing is known of."""
    return nested(lambda spec: None if spec is None else walk.sizes.shape(spec.shape), call.specs)


def _symbolic(walk: SymbolicProgram, term: Term) -> bool:
    return any(
        not all(isinstance(size, int) for size in walk.known.shapes.get(leaf.number, ()))
        if isinstance(leaf, Slot)
        else isinstance(leaf, Number) and isinstance(leaf.value, torch.SymInt)
        for leaf in leaves(term)
    )


def fixed_tensors(program: RankProgram) -> frozenset[int]:
    """Tensors made up front that an optimizer writes: parameters, gradients, its state.

    They are written in place, and after that read by nothing but ops on tensors of their own shape:
    an input that is changed in place goes into other ops then.
    """
    last: dict[int, int] = {}
    used: dict[int, int] = defaultdict(int)
    specs = program.specs()
    for at, call in enumerate(program.calls):
        plain = "::" in call.op and not call.is_collective and call.op not in IDLE
        op = find_op(call.op, call.overload) if plain else None
        changed = set() if op is None or call.op in COPIES else set(written_tensors(call, op))
        if op is not None and call.op not in COPIES:
            changed |= _statistics(call, op)
        if is_fused(call.op):
            changed = {n for n in call.reads() if _is_float(program.made.get(n))}
        for number in changed & program.made.keys():
            last[number] = at
        for number in set(call.reads()) & program.made.keys():
            if not is_fused(call.op) and _mixes(specs, call, number):
                used[number] = at
    floats = (n for n in last if _is_float(program.made[n]))
    return frozenset(n for n in floats if used.get(n, -1) <= last[n])


def _statistics(call: Call, op: Any) -> set[int]:
    """What a normalisation keeps of all batches; its schema does not say that it writes them."""
    pairs = call.named().items()
    return {n for name, term in pairs if name.startswith("running_") for n in slots(term)}


def is_fused(op: str) -> bool:
    """Optimizers' ops on lists of parameters."""
    return "_fused_" in op or "_foreach_" in op


def _is_float(spec: TensorSpec | None) -> bool:
    return spec is not None and spec.dtype not in WHOLE


def _mixes(specs: Mapping[int, TensorSpec], call: Call, number: int) -> bool:
    """Whether an op also takes tensors of another shape."""
    shapes = {specs[n].shape for n in call.reads() if n in specs}
    return bool(shapes - {specs[number].shape, ()})


SIZES = frozenset(
    {
        "size", "sizes", "shape", "self_sizes", "self_size", "input_sizes", "input_size",
        "normalized_shape", "num_weights", "output_size", "sym_size", "N", "C", "HxW",
    }
)  # fmt: skip
"""Arguments of ops that are sizes of tensors."""
COUNTED = frozenset({"aten::arange"})
"""Ops whose whole-number scalars are sizes."""


def with_symbols(call: Call, op: Any, sizes: Sizes) -> Call:
    """The call with a symbol for each of its numbers that is the size of a tensor."""
    names = [argument.name for argument in op._schema.arguments]
    counted = call.op in COUNTED

    def term_of(name: str, term: Term) -> Term:
        if name in SIZES or (counted and name in ("start", "end")):
            alone = not isinstance(term, tuple) or len(term) == 1
            return nested(lambda leaf: _fresh(leaf, sizes, alone), term)
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


def _fresh(term: Term, sizes: Sizes, alone: bool) -> Term:
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
        return word_value(term.text)
    return None


def written_tensors(call: Call, op: Any) -> list[int]:
    """Numbers of the tensors that an op changes in place."""
    found = []
    for argument, term in zip(op._schema.arguments, call.arguments, strict=False):
        if argument.is_write:
            found += slots(term)
    return found
