"""The ops that pass through PyTorch's dispatcher, and what they do to data.

`OpRecorder` works on fake tensors too, which have shapes, strides and memory but no data: then it
lists the ops of a step or of a program without running them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from predictor.model.op_calls import CAUSAL, Gradient, Lookup, LookupBackward, OpCall, Operand
from shardopt.extras import needs_torchrec

with needs_torchrec():
    import torch
    from torch.multiprocessing.reductions import StorageWeakRef
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves


DATA_TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    **{
        getattr(torch, f"float8_{kind}"): "fp8"
        for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")
    },
    **{
        getattr(torch, name): name
        for name in (
            *("int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "complex128"),
            # states of random generators, and hashes
            *("uint64", "uint32", "uint16"),
        )
    },
}
PRIVATE = ("prim", "prims", "profiler", "shardopt")
"""Namespaces whose ops do nothing to data."""


@dataclass
class RecordedCall:
    """A call, and the name of its op; the call's own name may say more than that."""

    call: OpCall
    op: str


@dataclass
class Recording:
    """Ops and events of one recorded step.

    Args:
        calls: in program order.
        marks: name of a part -> number of the call that it starts with.
        events: (number of calls made before, what happens between them) in order.
    """

    calls: list[RecordedCall] = field(default_factory=list)
    marks: dict[str, int] = field(default_factory=dict)
    events: list[tuple[int, Gradient | Lookup | LookupBackward]] = field(default_factory=list)


class OpRecorder(TorchDispatchMode):
    """Notes each op that runs under it, in `recording`.

    Args:
        custom: also those that are not PyTorch's own, as ``namespace::name``.
        frees: note when memory is given back; without, a call costs less.

    `under_way` is the op that was last called, and `path_now` gives the path of the module that an
    op which is called now belongs to.
    """

    def __init__(self, *, custom: bool = False, frees: bool = True) -> None:
        super().__init__()
        self.custom, self.frees = custom, frees
        self.recording = Recording()
        self.live: dict[int, tuple[StorageWeakRef, int]] = {}
        self.resident: dict[int, int] = {}
        self.gone: tuple[int, ...] = ()
        self.count = 0
        self.paused = False
        self.under_way = ""
        self.path_now: Callable[[], str] = str

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave out the ops that run within."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    def keep(self, tensors: Iterable[torch.Tensor]) -> tuple[Operand, ...]:
        """Tensors that outlive the step."""
        resident = self.operands(list(tensors))
        self.resident |= {key: number for key, (_, number) in self.live.items()}
        self.live.clear()
        return resident

    def mark(self, part: str) -> None:
        """A part of the step starts here."""
        self.recording.marks[part] = len(self.recording.calls)

    def gradient(self, parameter: torch.Tensor) -> None:
        """The gradient of a parameter is complete."""
        self.note(Gradient(parameter.numel(), parameter.element_size()))

    def note(self, event: Gradient | Lookup | LookupBackward) -> None:
        """Something happens between two calls."""
        self.recording.events.append((len(self.recording.calls), event))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (
            self.paused
            or func.namespace in PRIVATE
            or (func.namespace != "aten" and not self.custom)
        ):
            return func(*args, **kwargs)
        if self.frees:
            self._note_freed()
        op = self.under_way = str(func._schema.name.removeprefix("aten::"))
        path = self.path_now()
        inputs = self.operands((args, kwargs))
        result = func(*args, **kwargs)
        # foreach and fused ops give nothing back, but write into their lists
        outputs = self.operands(_written(func, args, kwargs) if result is None else result)
        # memory that a lookup's backward read last is freed after the op that follows it
        mutates = func._schema.is_mutable
        call = OpCall(_name(func, op, args, kwargs), inputs, outputs, self.gone, mutates, path)
        self.gone = ()
        self.recording.calls.append(RecordedCall(call, op))
        return result

    def operands(self, tree: Any) -> tuple[Operand, ...]:
        """The tensors of nested lists and mappings, in order."""
        leaves = tree_leaves(tree)
        return tuple(self._operand(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))

    def _note_freed(self) -> None:
        freed = [key for key, (storage, _) in self.live.items() if storage.expired()]
        self.gone += tuple(self.live.pop(key)[1] for key in freed)
        done = len(self.recording.calls)
        events = self.recording.events
        if self.gone and done and not (events and events[-1][0] == done):
            last = self.recording.calls[-1]
            last.call = replace(last.call, freed=last.call.freed + self.gone)
            self.gone = ()

    def _operand(self, tensor: torch.Tensor) -> Operand:
        storage = tensor.untyped_storage()
        key = storage._cdata
        number = self.resident.get(key)
        if number is None:
            if key not in self.live:
                self.live[key] = (StorageWeakRef(storage), self.count)
                self.count += 1
            number = self.live[key][1]
        return Operand(
            number,
            storage.nbytes(),
            tensor.storage_offset(),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            tensor.element_size(),
            DATA_TYPES.get(tensor.dtype, ""),
        )


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """Arguments that an op writes into, by its schema; it marks the gradients of fused optimizers,
    too, into which those write only for a loss scaler."""
    by_name = _by_name(func, args, kwargs)
    return [
        by_name[argument.name]
        for argument in func._schema.arguments
        if argument.is_write and argument.name in by_name and argument.name != "grads"
    ]


def _by_name(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    positional = zip(func._schema.arguments, args, strict=False)
    return {argument.name: value for argument, value in positional} | dict(kwargs)


def _name(func: Any, op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Name of a call, with the arguments that decide how much is computed: a power's exponent, and
    whether attention is causal."""
    if op == "pow" and isinstance(args[1], (int, float)):
        return f"pow_{args[1]:g}"
    if op.startswith("_scaled_dot_product") and _by_name(func, args, kwargs).get("is_causal"):
        return op + CAUSAL
    return op
