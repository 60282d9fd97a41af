"""A program at another batch size, out of the same job's programs at two.

One trace does not tell which of its sizes are the batch: 64 may be samples, a width, or both. Two
do: what differs grows with the batch. Extents of tensors are linear in it, so that those at once
and at twice the batch give those at any multiple. What more than doubles is refused: such as the
square of the batch, it is not linear, or it was drawn anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from predictor.errors import InputError
from shardopt.replay.program.program import Call, Number, RankProgram, TensorSpec, Term
from shardopt.replay.program.tensors import contiguous

LISTED = 8


class _UnlikeError(Exception):
    """Two things differ in more than whole numbers that grow; says how."""


def scale_by_pair(one: RankProgram, two: RankProgram, times: int) -> RankProgram:
    """The program at `times` the batch of `one`; recorded times are dropped.

    Args:
        two: of the same rank at twice the batch of `one`.

    Raises:
        InputError: the programs are not of one job, or something in them does not scale; lists the
            ops.
    """
    names = [[(call.op, call.overload) for call in program.calls] for program in (one, two)]
    if names[0] != names[1] or one.groups != two.groups or one.made.keys() != two.made.keys():
        raise InputError(
            f"rank {two.rank} does not run the same ops on the same tensors at twice the batch; "
            "give traces of the same step of the same job",
            inputs=("doubled",),
        )
    problems: dict[str, str] = {}
    calls, made, fills = [], {}, {}
    for first, second in zip(one.calls, two.calls, strict=True):
        try:
            calls.append(_call(first, second, times))
        except _UnlikeError as error:
            problems.setdefault(first.op, str(error))
    for number, spec in one.made.items():
        try:
            made[number] = _spec(spec, two.made[number], times)
            if number in one.fills:
                fills[number] = _fill(one.fills[number], two.fills.get(number, {}), times)
        except _UnlikeError as error:
            problems.setdefault(f"tensor {number} of those made up front", str(error))
    if problems:
        listed = "; ".join(f"{op}: {why}" for op, why in list(problems.items())[:LISTED])
        raise InputError(
            f"the batch cannot be scaled: {len(problems)} kinds of ops or tensors do not scale: "
            f"{listed}",
            inputs=("scale",),
        )
    return replace(one, calls=calls, made=made, fills=fills)


def _call(one: Call, two: Call, times: int) -> Call:
    if (one.outputs, one.frees, one.section) != (two.outputs, two.frees, two.section):
        raise _UnlikeError("gives other tensors")
    if one.keywords.keys() != two.keywords.keys():
        raise _UnlikeError("has other arguments")
    if one.op == "wait":
        return one
    size = one.bytes
    return replace(
        one,
        arguments=_terms(one.arguments, two.arguments, times),
        keywords={k: _term(v, two.keywords[k], times) for k, v in one.keywords.items()},
        specs=_specs(one.specs, two.specs, times),
        bytes=None if size is None else _whole(size, two.bytes, times),
        us=None,
    )


def _terms(one: tuple[Term, ...], two: tuple[Term, ...], times: int) -> tuple[Term, ...]:
    if len(one) != len(two):
        raise _UnlikeError("has lists of other lengths")
    return tuple(_term(a, b, times) for a, b in zip(one, two, strict=True))


def _term(one: Term, two: Term, times: int) -> Term:
    if one == two:
        return one
    if isinstance(one, tuple) and isinstance(two, tuple):
        return _terms(one, two, times)
    if isinstance(one, Number) and isinstance(two, Number):
        return Number(_whole(one.value, two.value, times))
    raise _UnlikeError(f"an argument is {one} at once, {two} at twice the batch")


def _whole(one: Any, two: Any, times: int) -> int:
    both = (one, two)
    if any(isinstance(n, bool) or not isinstance(n, int) for n in both):
        raise _UnlikeError(f"a number is {one} at once, {two} at twice the batch")
    if one != two and not 0 <= one < two <= 2 * one:
        raise _UnlikeError(f"a size goes from {one} to {two} as the batch doubles")
    return int(one + (two - one) * (times - 1))


def _specs(one: Any, two: Any, times: int) -> Any:
    if isinstance(one, tuple) and isinstance(two, tuple) and len(one) == len(two):
        return tuple(_specs(a, b, times) for a, b in zip(one, two, strict=True))
    if one is None and two is None:
        return None
    if isinstance(one, TensorSpec) and isinstance(two, TensorSpec):
        # storages are the trace's own names here
        return _spec(one, replace(two, storage=one.storage), times)
    raise _UnlikeError("gives other tensors")


def _spec(one: TensorSpec, two: TensorSpec, times: int) -> TensorSpec:
    alike = (one.dtype, one.storage, one.host, len(one.shape))
    if alike != (two.dtype, two.storage, two.host, len(two.shape)):
        raise _UnlikeError("takes or gives tensors of another kind or memory")
    shape = tuple(_whole(a, b, times) for a, b in zip(one.shape, two.shape, strict=True))
    if all(spec.strides == contiguous(spec.shape) for spec in (one, two)):
        strides = contiguous(shape)
    else:
        steps = zip(one.strides, two.strides, strict=True)
        strides = tuple(_whole(a, b, times) for a, b in steps)
    return replace(one, shape=shape, strides=strides, offset=_whole(one.offset, two.offset, times))


def _fill(one: Mapping[str, Any], two: Mapping[str, Any], times: int) -> dict[str, Any]:
    if one.keys() != two.keys() or one["kind"] != two["kind"]:
        raise _UnlikeError("holds other values")
    return {key: _value(value, two[key], times) for key, value in one.items()}


def _value(one: Any, two: Any, times: int) -> Any:
    if one == two:
        return one
    if isinstance(one, list) and len(one) == len(two):
        return [_whole(a, b, times) for a, b in zip(one, two, strict=True)]
    return _whole(one, two, times)
