"""A program at another batch size, out of the same job's programs at two.

One trace does not tell which of its sizes are the batch: 64 may be samples, a width, or both. Two
do: what differs grows with the batch. Extents of tensors are linear in it, so that those at once
and at twice the batch give those at any multiple. What more than doubles is refused: such as the
square of the batch, it is not linear, or it was drawn anew.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from predictor.errors import InputError
from shardopt.replay.program.program import Call, RankProgram, TensorSpec
from shardopt.replay.program.tensors import contiguous

LISTED = 8


class _UnlikeError(Exception):
    """Two things differ in more than whole numbers that grow; says how."""


def scale_by_pair(one: RankProgram, two: RankProgram, times: int) -> RankProgram:
    """The program at `times` the batch of `one`; recorded times are dropped.

    What its tensors hold is as before: `shardopt.replay.program.values.fills_of` makes it anew.

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
    calls, made = [], {}
    for first, second in zip(one.calls, two.calls, strict=True):
        try:
            calls.append(_call(first, second, times))
        except _UnlikeError as error:
            problems.setdefault(first.op, str(error))
    for number, spec in one.made.items():
        try:
            if spec.storage != two.made[number].storage:
                raise _UnlikeError("lies in other memory")
            made[number] = _spec(spec, two.made[number], times)
        except _UnlikeError as error:
            problems.setdefault(f"tensor {number} of those made up front", str(error))
    if problems:
        listed = "; ".join(f"{op}: {why}" for op, why in list(problems.items())[:LISTED])
        raise InputError(
            f"the batch cannot be scaled: {len(problems)} kinds of ops or tensors do not scale: "
            f"{listed}",
            inputs=("scale",),
        )
    return replace(one, calls=calls, made=made)


def _call(one: Call, two: Call, times: int) -> Call:
    alike = [(of.outputs, of.frees, of.section, of.waits) for of in (one, two)]
    if alike[0] != alike[1]:
        raise _UnlikeError("gives other tensors")
    names = ("arguments", "keywords", "specs", "bytes")
    scaled = {name: _pair(getattr(one, name), getattr(two, name), times) for name in names}
    return replace(one, **scaled, us=None)


def _pair(one: Any, two: Any, times: int) -> Any:
    """What two values become at `times` the batch of the first, whatever they are made of."""
    if one == two:
        return one
    if type(one) is type(two):
        if isinstance(one, tuple) and len(one) == len(two):
            return tuple(_pair(a, b, times) for a, b in zip(one, two, strict=True))
        if isinstance(one, dict) and one.keys() == two.keys():  # keywords
            return {key: _pair(value, two[key], times) for key, value in one.items()}
        if isinstance(one, TensorSpec):
            return _spec(one, two, times)
        if type(one) is int:
            if 0 <= one < two <= 2 * one:
                return one + (two - one) * (times - 1)
            raise _UnlikeError(f"a size goes from {one} to {two} as the batch doubles")
    raise _UnlikeError(f"has {one} at once, {two} at twice the batch")


def _spec(one: TensorSpec, two: TensorSpec, times: int) -> TensorSpec:
    alike = (one.dtype, one.host, len(one.shape))
    if alike != (two.dtype, two.host, len(two.shape)):
        raise _UnlikeError("takes or gives tensors of another kind or memory")
    shape = _pair(one.shape, two.shape, times)
    if all(spec.strides == contiguous(spec.shape) for spec in (one, two)):
        strides = contiguous(shape)
    else:
        strides = _pair(one.strides, two.strides, times)
    return replace(one, shape=shape, strides=strides, offset=_pair(one.offset, two.offset, times))
