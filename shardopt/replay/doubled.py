"""A program at another batch size, out of the same job's programs at two.

One trace does not tell which of its sizes are the batch: 64 may be samples, a width, or both. Two
do: sizes that differ grow with the batch. Extents of tensors are linear in it, so the extents at
the batch and at twice the batch give those at any multiple. An extent that more than doubles is
refused: it is not linear, such as the square of the batch, or it was drawn anew.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from predictor.errors import InputError
from shardopt.replay.program.program import Call, RankProgram, TensorSpec
from shardopt.replay.program.tensors import contiguous

LISTED = 8


class _UnlikeError(Exception):
    """Two values differ in more than whole numbers that grow; says how."""


def scale_by_pair(base: RankProgram, twice: RankProgram, times: int) -> RankProgram:
    """Return the program at `times` the batch of `base`, without recorded times.

    Its fills are those of `base`; `shardopt.replay.program.values.fills_of` makes new ones.

    Args:
        twice: program of the same rank at twice the batch of `base`.

    Raises:
        InputError: the programs are not of one job, or something in them does not scale; lists the
            ops.
    """
    names = [[(call.op, call.overload) for call in program.calls] for program in (base, twice)]
    if names[0] != names[1] or base.groups != twice.groups or base.made.keys() != twice.made.keys():
        raise InputError(
            f"rank {twice.rank} does not run the same ops on the same tensors at twice the batch; "
            "give traces of the same step of the same job",
            inputs=("doubled",),
        )
    problems: dict[str, str] = {}
    calls, up_front = [], {}
    for first, second in zip(base.calls, twice.calls, strict=True):
        try:
            calls.append(_call(first, second, times))
        except _UnlikeError as error:
            problems.setdefault(first.op, str(error))
    for number, spec in base.made.items():
        try:
            if spec.storage != twice.made[number].storage:
                raise _UnlikeError("lies in other memory")
            up_front[number] = _spec(spec, twice.made[number], times)
        except _UnlikeError as error:
            problems.setdefault(f"tensor {number} of those made up front", str(error))
    if problems:
        listed = "; ".join(f"{op}: {why}" for op, why in list(problems.items())[:LISTED])
        raise InputError(
            f"the batch cannot be scaled: {len(problems)} kinds of ops or tensors do not scale: "
            f"{listed}",
            inputs=("scale",),
        )
    return replace(base, calls=calls, made=up_front)


def _call(first: Call, second: Call, times: int) -> Call:
    alike = [(call.outputs, call.frees, call.section, call.waits) for call in (first, second)]
    if alike[0] != alike[1]:
        raise _UnlikeError("gives other tensors")
    names = ("arguments", "keywords", "specs", "bytes")
    scaled = {name: _pair(getattr(first, name), getattr(second, name), times) for name in names}
    return replace(first, **scaled, us=None)


def _pair(first: Any, second: Any, times: int) -> Any:
    """Extrapolate two values, at once and twice the batch, to `times` the batch.

    Raises:
        _UnlikeError: they differ in more than whole numbers that grow.
    """
    if first == second:
        return first
    if type(first) is type(second):
        if isinstance(first, tuple) and len(first) == len(second):
            return tuple(_pair(a, b, times) for a, b in zip(first, second, strict=True))
        if isinstance(first, dict) and first.keys() == second.keys():  # keywords
            return {key: _pair(value, second[key], times) for key, value in first.items()}
        if isinstance(first, TensorSpec):
            return _spec(first, second, times)
        if type(first) is int:
            if 0 <= first < second <= 2 * first:
                return first + (second - first) * (times - 1)
            raise _UnlikeError(f"a size goes from {first} to {second} as the batch doubles")
    raise _UnlikeError(f"has {first} at once, {second} at twice the batch")


def _spec(first: TensorSpec, second: TensorSpec, times: int) -> TensorSpec:
    alike = (first.dtype, first.host, len(first.shape))
    if alike != (second.dtype, second.host, len(second.shape)):
        raise _UnlikeError("takes or gives tensors of another kind or memory")
    shape = _pair(first.shape, second.shape, times)
    if all(spec.strides == contiguous(spec.shape) for spec in (first, second)):
        strides = contiguous(shape)
    else:
        strides = _pair(first.strides, second.strides, times)
    offset = _pair(first.offset, second.offset, times)
    return replace(first, shape=shape, strides=strides, offset=offset)
