"""Runs a scaled program again on fake tensors: each op must give the shapes that it is said to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from predictor.errors import InputError
from shardopt.replay.program.program import Call, RankProgram, TensorSpec, number_outputs
from shardopt.replay.scale.ops import op_of, run
from shardopt.replay.scale.sizes import batch_unclear
from shardopt.replay.scale.walk import FAILS, IDLE

FOREIGN = ("wait", "backward of ", "c10d::", "fbgemm::")
"""Calls that fake tensors know nothing of."""
Specs = Mapping[int, TensorSpec]


def check_scaled(before: RankProgram, after: RankProgram) -> RankProgram:
    """The scaled program, with strides as its ops give them.

    Args:
        before: the program as recorded; ops that fake tensors do not run on it are not checked.

    Raises:
        InputError: an op fails or gives other shapes than the scaled program says.
    """
    olds, news = dict(before.made), dict(after.made)
    calls = []
    with torch.no_grad(), FakeTensorMode(allow_fallback_kernels=False):
        for at, (old, new) in enumerate(zip(before.calls, after.calls, strict=True)):
            changed = any(olds.get(n) != news.get(n) for n in new.reads()) or old.specs != new.specs
            if changed and not new.op.startswith(FOREIGN) and new.op not in IDLE:
                new = _check_call(at, old, new, olds, news)
            calls.append(new)
            olds.update(number_outputs(old.outputs, old.specs))
            news.update(number_outputs(new.outputs, new.specs))
    return replace(after, calls=calls)


def _check_call(at: int, old: Call, new: Call, olds: Specs, news: Specs) -> Call:
    op = op_of(new)
    if op is None:
        return new
    try:
        base = _outputs(run(op, old, lambda n: _fake(olds, n)), old)
    except FAILS:
        return new
    if not _alike(base, old.specs):
        return new
    try:
        made = _outputs(run(op, new, lambda n: _fake(news, n)), new)
    except FAILS as error:
        raise _refusal(at, new, str(error).split("\n")[0][:120]) from error
    if not _alike(made, new.specs):
        raise _refusal(at, new, "it gives other shapes than what follows takes")
    specs = zip(old.specs, new.specs, base, made, strict=False)
    return replace(new, specs=tuple(_with_strides(*of) for of in specs))


def _refusal(at: int, call: Call, why: str) -> InputError:
    return batch_unclear(
        f"op {at}, {call.op}, does not run at the sizes that follow from one trace: {why}"
    )


def _fake(specs: Specs, number: int) -> torch.Tensor:
    spec = specs[number]
    return torch.empty_strided(spec.shape, spec.strides, dtype=getattr(torch, spec.dtype))


def _outputs(output: Any, call: Call) -> tuple[Any, ...]:
    listed = isinstance(output, (tuple, list))
    one = len(call.specs) == 1 and not (listed and not isinstance(call.specs[0], tuple))
    return (output,) if one else tuple(output) if listed else (output,)


def _alike(outputs: Any, specs: Any) -> bool:
    if specs is None:
        return True
    if isinstance(specs, TensorSpec):
        return isinstance(outputs, torch.Tensor) and tuple(outputs.shape) == specs.shape
    if outputs is None or isinstance(outputs, torch.Tensor):
        return not specs
    return len(outputs) >= len(specs) and all(map(_alike, outputs, specs))


def _with_strides(old: Any, new: Any, base: Any, made: Any) -> Any:
    """Strides as the op gives them, where it gave the recorded ones."""
    if isinstance(new, tuple):
        return tuple(map(_with_strides, old, new, base, made))
    if new is None or tuple(base.stride()) != old.strides:
        return new
    return replace(new, strides=tuple(made.stride()), offset=_offset(old, base, made))


def _offset(old: TensorSpec, base: torch.Tensor, made: torch.Tensor) -> int:
    """Where the tensor begins in its storage."""
    fits = old.offset == base.storage_offset()
    return int(made.storage_offset()) if fits else old.offset
