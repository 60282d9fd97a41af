"""Walks a program with symbols for sizes: which size follows from which.

Ops run under PyTorch's fake tensors on symbolic sizes; those that have plain numbers for sizes, or
no fake kernel, follow `rules`. Parameters and what else an optimizer writes keep their sizes.

Why: docs/decisions/0020-benchmarks-from-traces.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardopt.replay.program.program import (
    WHOLE,
    Call,
    RankProgram,
    Slot,
    Term,
    Word,
    leaves,
    nested,
    number_outputs,
    slots,
)
from shardopt.replay.program.schema import find_op, word_value
from shardopt.replay.scale.rules import rule_of, shapes_of
from shardopt.replay.scale.sizes import Sizes, SymbolicProgram, UndecidedError

IDLE = frozenset({"aten::item", "aten::record_stream", "aten::_local_scalar_dense"})
"""Ops that give no tensor and read no more than they are given."""
BAGS = frozenset({f"aten::{n}embedding_bag{m}" for n in ("", "_") for m in ("", "_forward_only")})
"""Lookups of PyTorch that pool: ids, and a start a bag, grow with the batch."""
COPIES = frozenset({"aten::copy_", "aten::zero_", "aten::fill_", "aten::detach_"})
"""Ops that write a tensor which need not be a parameter."""
FAILS = (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError, AssertionError)


def walk_program(program: RankProgram, samples: int) -> SymbolicProgram:
    """The program with symbols for all sizes that may be the batch's.

    Raises:
        UndecidedError: sizes of the trace do not fit each other.
    """
    sizes = Sizes(samples)
    walk = SymbolicProgram(program, sizes, fixed_tensors(program))
    with torch.no_grad(), FakeTensorMode(allow_fallback_kernels=False, shape_env=sizes.env):
        for at, call in enumerate(program.calls):
            sizes.begin(call.op)
            try:
                changed, shapes = _call(walk, call)
            except (*FAILS, KeyError, AttributeError) as error:
                raise UndecidedError(
                    f"op {at}, {call.op}, has arguments of its own kind"
                ) from error
            walk.calls.append(changed)
            walk.outputs.append(shapes)
            walk.shapes.update(number_outputs(call.outputs, shapes))
            walk.specs.update(number_outputs(call.outputs, call.specs))
    return walk


def _call(walk: SymbolicProgram, call: Call) -> tuple[Call, tuple[Any, ...]]:
    rule = rule_of(call)
    if rule is not None:
        shapes, changed = rule(walk, call)
        arguments = tuple(changed.get(at, term) for at, term in enumerate(call.arguments))
        return replace(call, arguments=arguments), shapes
    if call.op in IDLE:
        return call, ()
    op = find_op(call.op, call.overload)
    if op is None:
        return call, _leave_open(walk, call)
    wanted = shapes_of(call.specs)
    made = with_symbols(call, op, walk.sizes)
    if call.op in BAGS:
        _bags(walk, call)
    _tie(walk, made)
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


def _tie(walk: SymbolicProgram, call: Call) -> None:
    """Sizes among arguments that PyTorch does not compare with the other tensors."""
    named: dict[str, Any] = call.named()
    given = call.arguments[0] if call.arguments else None
    first = walk.of(given) if isinstance(given, Slot) else ()
    pairs: list[tuple[Any, Any]] = []
    if "normalized_shape" in named:
        pairs = list(zip(reversed(named["normalized_shape"]), reversed(first), strict=False))
    elif call.op == "aten::index_select_backward":
        dim = named["dim"] % len(first)
        pairs = list(zip(named["self_sizes"], first, strict=True))
        del pairs[dim]
    for size, other in pairs:
        walk.sizes.equal(size, other)


def _bags(walk: SymbolicProgram, call: Call) -> None:
    named = call.named()
    walk.sizes.grows(walk.of(named["indices"])[0], ids=True)
    starts = walk.of(named["offsets"])[0]
    walk.sizes.grows(starts - 1 if named.get("include_last_offset") else starts)


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
    return torch.empty(walk.shapes[number], dtype=dtype)


def _shape(walk: SymbolicProgram, output: Any) -> Any:
    if isinstance(output, (tuple, list)):
        return tuple(_shape(walk, item) for item in output)
    return walk.sizes.plain(output.shape) if isinstance(output, torch.Tensor) else None


def _leave_open(walk: SymbolicProgram, call: Call) -> Any:
    """Shapes whose sizes nothing is known of."""
    return nested(lambda spec: None if spec is None else walk.sizes.shape(spec.shape), call.specs)


def _symbolic(walk: SymbolicProgram, term: Term) -> bool:
    sizes = (
        size
        for leaf in leaves(term)
        for size in (walk.shapes.get(leaf.number, ()) if isinstance(leaf, Slot) else (leaf,))
    )
    return any(isinstance(size, torch.SymInt) for size in sizes)


def fixed_tensors(program: RankProgram) -> frozenset[int]:
    """Tensors made up front that an optimizer writes: parameters, gradients, its state.

    They are written in place, and after that read by nothing but ops on tensors of their own shape:
    an input that is changed in place goes into other ops then.
    """
    last: dict[int, int] = {}
    used: dict[int, int] = {}
    specs = program.specs()
    floats = {n for n, spec in program.made.items() if spec.dtype not in WHOLE}
    for at, call in enumerate(program.calls):
        own = floats.intersection(call.reads())
        if "_fused_" in call.op or "_foreach_" in call.op:  # optimizers' ops on parameters
            last |= dict.fromkeys(own, at)
            continue
        last |= dict.fromkeys(own & _written(call), at)
        shapes = {specs[n].shape for n in call.reads() if n in specs} - {()}
        used |= {n: at for n in own if shapes - {specs[n].shape}}
    return frozenset(n for n in last if used.get(n, -1) <= last[n])


def _written(call: Call) -> set[int]:
    """What an op changes in place, with what a normalisation keeps of all batches."""
    known = "::" in call.op and not call.is_collective and call.op not in IDLE | COPIES
    op = find_op(call.op, call.overload) if known else None
    if op is None:
        return set()
    pairs = zip(op._schema.arguments, call.arguments, strict=False)
    found = {n for argument, term in pairs if argument.is_write for n in slots(term)}
    kept = (of for name, of in call.named().items() if name.startswith("running_"))
    return found | {n for term in kept for n in slots(term)}


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
        if name not in SIZES and not (counted and name in ("start", "end")):
            return term
        alone = not isinstance(term, tuple) or len(term) == 1
        return nested(lambda n: sizes.fresh(n, ids=alone) if type(n) is int else n, term)

    arguments = [term_of(*pair) for pair in zip(names, call.arguments, strict=False)]
    if {"size", "stride"} <= set(names):
        at, to = names.index("size"), names.index("stride")
        arguments[to] = _strides(arguments[at], call.arguments[at], call.arguments[to])
    keywords = {name: term_of(name, term) for name, term in call.keywords.items()}
    return replace(call, arguments=tuple(arguments), keywords=keywords)


def _strides(sizes: Any, recorded: Any, strides: Any) -> Term:
    """Strides of a tensor without gaps, in the order of its dimensions in memory.

    Raises:
        UndecidedError: it has gaps.
    """
    made: dict[int, Any] = {}
    step, now = 1, 1
    for i in sorted(range(len(recorded)), key=lambda i: (strides[i], recorded[i], -i)):
        if strides[i] != step:
            raise UndecidedError("an op makes a tensor with gaps")
        made[i] = now
        step, now = step * recorded[i], now * sizes[i]
    return tuple(made[i] for i in range(len(recorded)))


def run(op: Any, call: Call, tensor: Callable[[int], Any]) -> Any:
    """What an op gives.

    Args:
        tensor: of a number.
    """

    def value(term: Term) -> Any:
        if isinstance(term, Slot):
            return tensor(term.number)
        if isinstance(term, tuple):
            return [value(item) for item in term]
        return word_value(term.text) if isinstance(term, Word) else term

    keywords = {name: value(term) for name, term in call.keywords.items()}
    return op(*map(value, call.arguments), **keywords)
