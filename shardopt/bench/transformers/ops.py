"""The ops of a training step without running it: PyTorch's dispatcher over fake tensors.

Forward, backward and optimizer go through the dispatcher of the CPU with tensors that have shapes,
strides and memory but no data, so the list is that of a real step, op by op.
"""

from __future__ import annotations

import bisect
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from predictor.cost.cpu_ops import OpRow, kind_and_sizes
from predictor.cost.op_calls import OpCall, Operand
from predictor.cost.reuse import reuse_bytes
from predictor.iteration.op_graph import Bucket, OpStep
from predictor.model.transformer import TransformerShape
from shardopt.bench.transformers.models import Training

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1024 * 1024, 25 * 1024 * 1024
"""DDP's own, where nobody gives ``bucket_cap_mb`` (torch/nn/parallel/distributed.py)."""


@dataclass
class Recorded:
    """A call, and the op's own name, which the call's may tell more than."""

    call: OpCall
    op: str


@dataclass
class Recording:
    """One step.

    Args:
        calls: in program order.
        marks: name of a part -> number of the call that it starts with.
        gradients: (number of calls made before, bytes) of every parameter gradient, in order.
    """

    calls: list[Recorded] = field(default_factory=list)
    marks: dict[str, int] = field(default_factory=dict)
    gradients: list[tuple[int, int]] = field(default_factory=list)


def recorded(shape: TransformerShape, *, real: bool = False) -> Recording:
    """The second step of a training, when the optimizer has its states.

    Args:
        real: run it, instead of passing fake tensors through it.
    """
    from contextlib import nullcontext

    from torch._subclasses.fake_tensor import FakeTensorMode

    with nullcontext() if real else FakeTensorMode():
        training = Training(shape)
        recorder = Recorder()
        for parameter in training.model.parameters():
            parameter.register_post_accumulate_grad_hook(recorder.gradient)
        with recorder:
            training.step(recorder.mark)
    return recorder.recording


class Recorder(TorchDispatchMode):
    """Notes each op of PyTorch's own that runs under it, in `recording`."""

    def __init__(self) -> None:
        super().__init__()
        self.recording = Recording()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.count = 0

    def mark(self, part: str) -> None:
        """A part of the step starts here."""
        self.recording.marks[part] = len(self.recording.calls)

    def gradient(self, parameter: torch.Tensor) -> None:
        """The gradient of a parameter is complete."""
        size = parameter.numel() * parameter.element_size()
        self.recording.gradients.append((len(self.recording.calls), size))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "aten":
            return func(*args, **kwargs)
        self._note_freed()
        given = self._operands((args, kwargs))
        result = func(*args, **kwargs)
        op = str(func._schema.name.removeprefix("aten::"))
        call = OpCall(
            _name(op, args), given, self._operands(result), mutates=func._schema.is_mutable
        )
        self.recording.calls.append(Recorded(call, op))
        return result

    def _operands(self, tree: Any) -> tuple[Operand, ...]:
        leaves = tree_leaves(tree)
        return tuple(self._operand(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))

    def _note_freed(self) -> None:
        gone = [key for key, (storage, _) in self.live.items() if storage.expired()]
        numbers = tuple(self.live.pop(key)[1] for key in gone)
        if numbers and self.recording.calls:
            last = self.recording.calls[-1]
            last.call = replace(last.call, freed=last.call.freed + numbers)

    def _operand(self, tensor: torch.Tensor) -> Operand:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.live:
            self.live[key] = (StorageWeakRef(storage), self.count)
            self.count += 1
        return Operand(
            self.live[key][1],
            storage.nbytes(),
            tensor.storage_offset(),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.element_size(),
        )


class OpClock(TorchDispatchMode):
    """Times each op of a step where it happens; ``ms`` in the order of `Recording.calls`."""

    def __init__(self) -> None:
        super().__init__()
        self.ms: list[float] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        start = time.perf_counter_ns()
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten":
            self.ms.append((time.perf_counter_ns() - start) / 1e6)
        return result


def _name(op: str, args: tuple[Any, ...]) -> str:
    """Name of a call; a power's exponent decides how it is computed."""
    return f"pow_{args[1]:g}" if op == "pow" and isinstance(args[1], (int, float)) else op


def op_step(recording: Recording) -> OpStep:
    """Calls of one part, kind and size become one row.

    A part of the backward ends where a bucket of gradients is complete.
    """
    calls = [recorded.call for recorded in recording.calls]
    ends, buckets = _buckets(recording)
    found: dict[str, dict[tuple[str, tuple[int, ...]], list[Any]]] = {}
    for at, (call, reuse) in enumerate(zip(calls, reuse_bytes(calls), strict=True)):
        rows = found.setdefault(_part(at, recording.marks, ends), {})
        rows.setdefault(kind_and_sizes(call), []).append(reuse)
    parts = {
        part: tuple(
            OpRow(kind, sizes, tuple(map(float, sum(reuses))), len(reuses))
            for (kind, sizes), reuses in rows.items()
        )
        for part, rows in found.items()
    }
    return OpStep(parts, buckets)


def row_index(recording: Recording) -> list[int]:
    """The row of every call, counted through all parts of `op_step`."""
    ends, _ = _buckets(recording)
    rows: dict[tuple[str, str, tuple[int, ...]], int] = {}
    keys = []
    for at, recorded in enumerate(recording.calls):
        part = _part(at, recording.marks, ends)
        keys.append((part, *kind_and_sizes(recorded.call)))
        rows.setdefault(keys[-1], len(rows))
    # parts follow each other, so rows are numbered part by part as they first appear
    return [rows[key] for key in keys]


def _buckets(recording: Recording) -> tuple[list[int], tuple[Bucket, ...]]:
    """Number of the call that completes each bucket, and what it holds.

    As DistributedDataParallel rebuilds its buckets after the first step: gradients in the order in
    which they arrive, the first bucket of 1 MiB, the others of 25 MiB, none split.
    """
    ends: list[int] = []
    buckets: list[Bucket] = []
    count, size, cap = 0, 0, FIRST_BUCKET_BYTES
    for at, more in recording.gradients:
        count, size = count + 1, size + more
        if size >= cap:
            ends.append(at)
            buckets.append(Bucket(count, size))
            count, size, cap = 0, 0, BUCKET_BYTES
    if count:
        ends.append(recording.marks["optimizer"])
        buckets.append(Bucket(count, size))
    return ends, tuple(buckets)


def _part(at: int, marks: dict[str, int], ends: list[int]) -> str:
    if at < marks["backward"]:
        return "forward"
    if at >= marks["optimizer"]:
        return "optimizer"
    return f"backward.{min(bisect.bisect_right(ends, at), len(ends) - 1)}"
