"""The ops that pass through PyTorch's dispatcher: what they do to data, or how long each takes.

`Recorder` works on fake tensors too, which have shapes, strides and memory but no data: then it
lists the ops of a step or of a program without running them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from typing import Any

from predictor.model.op_calls import OpCall, Operand
from shardopt.extras import needs_torchrec

with needs_torchrec():
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves


@dataclass
class RecordedCall:
    """A call, and the name of its op; the call's own name may say more than that."""

    call: OpCall
    op: str


@dataclass
class Recording:
    """What a recorder has seen, of one step.

    Args:
        calls: in program order.
        marks: name of a part -> number of the call that it starts with.
        gradients: (number of calls made before, bytes) of every parameter gradient, in order.
    """

    calls: list[RecordedCall] = field(default_factory=list)
    marks: dict[str, int] = field(default_factory=dict)
    gradients: list[tuple[int, int]] = field(default_factory=list)


class Recorder(TorchDispatchMode):
    """Notes each of PyTorch's own ops that run under it, in `recording`."""

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
        self.recording.calls.append(RecordedCall(call, op))
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
