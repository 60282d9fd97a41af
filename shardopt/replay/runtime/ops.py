"""Ops by name: looked up, tried once, and then called directly."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from .checks import COMMS, refuse
from .collectives import EndedCollective, RankCollectives
from .settings import device, settings
from .tensors import ON_CPU, difference, like

LIBRARIES = {"fbgemm": "fbgemm_gpu", "torchvision": "torchvision"}
"""Namespace of ops -> module that registers them when it is imported."""


class Ops:
    """Ops that a program names; each is tried once before it is timed."""

    def __init__(self) -> None:
        self.named: dict[str, RunnableOp] = {}
        self.collectives: RankCollectives | None = None
        for module in settings.imports:
            try:
                importlib.import_module(module)
            except ImportError as error:
                refuse(f"--import {module}: {error}; put its folder on PYTHONPATH")

    def __call__(self, name: str, overload: str) -> RunnableOp:
        op = RunnableOp(f"{name}.{overload}", _find(name, overload))
        if device.type == "cpu" and name in ON_CPU and not isinstance(op.function, str):
            op.runs_as, op.function = ON_CPU[name]
        self.named[op.name] = op
        return op

    def notes(self) -> list[str]:
        """Return notes on the substitutes for ops that a CPU does not have."""
        return [
            f"{name.partition('.')[0]} runs as {op.runs_as}: a CPU has none"
            for name, op in self.named.items()
            if op.runs_as and op.calls and not op.skipped
        ]

    def collective(self, kind: str) -> RunnableOp:
        """Register a collective of `torch.distributed` under c10d's name."""

        def run(*arguments: Any, group: int) -> Any:
            assert self.collectives is not None
            return self.collectives.run(kind, arguments, group)

        op = self.named[COMMS + kind] = RunnableOp(COMMS + kind, run)
        return op

    @staticmethod
    def forward(op: Callable[..., Any], *arguments: Any) -> Any:
        """Run an op whose backward function is called later."""
        with torch.enable_grad():
            first = arguments[0]
            if first is not None and not first.requires_grad:
                first.requires_grad_(True)
            output = op(*arguments)
        return output, (output, first)

    @staticmethod
    def backward(saved: Any, gradient: Any) -> Any:
        """Run the backward function of an op that `forward` ran."""
        output, first = saved
        if not output.requires_grad:
            return None
        return torch.autograd.grad([output], [first], [gradient], allow_unused=True)[0]


def _find(name: str, overload: str) -> Callable[..., Any] | str:
    """Return the op, or the reason why there is none."""
    if f"{name}.{overload}" in settings.without:
        return "ends the process here"
    space, _, op = name.partition("::")
    if space in LIBRARIES:
        with suppress(ImportError, OSError):
            importlib.import_module(LIBRARIES[space])
    try:
        packet = getattr(getattr(torch.ops, space), op)
        return getattr(packet, overload)._op
    except (AttributeError, RuntimeError):
        return "is not installed here"


class RunnableOp:
    """An op by name that counts its calls, so that each meets its record of the trace."""

    def __init__(self, name: str, function: Callable[..., Any] | str) -> None:
        self.name, self.function = name, function
        self.calls: list[int] = []
        self.recorded: list[Any] = []
        self.instead: dict[int, Any] = {}
        self.reasons: dict[int, str] = {}
        self.skipped = False
        self.runs_as = ""
        self.at = 0

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Try the op; if it cannot run, give tensors of the recorded shapes for this call."""
        at = self.at
        self.at += 1
        if self.skipped:
            return self.stand_in(at, arguments)
        if isinstance(self.function, str):
            return self._replace(at, arguments, self.function)
        if settings.last_op is not None:
            with suppress(OSError):
                settings.last_op.write_text(self.name)
        try:
            output = self.function(*arguments, **keywords)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError) as error:
            if self.name.startswith(COMMS):
                raise
            why = str(error).strip().split("\n")[0].split(". ")[0][:160]
            return self._replace(at, arguments, f"{type(error).__name__}: {why}")
        wrong = difference(output, self.recorded[at] if at < len(self.recorded) else None)
        return self._replace(at, arguments, wrong) if wrong else output

    def _replace(self, at: int, arguments: Sequence[Any], why: str) -> Any:
        self.reasons[at] = why
        return self.stand_in(at, arguments)

    def stand_in(self, at: int, arguments: Sequence[Any]) -> Any:
        """Return tensors like those that the op gave in the trace, made once."""
        if self.name.startswith(COMMS):
            return EndedCollective()
        if at not in self.instead:
            specs = self.recorded[at] if at < len(self.recorded) else None
            tensors = [like(spec, _place(arguments)) for spec in specs or ()]
            self.instead[at] = tensors[0] if len(tensors) == 1 else tensors
        return self.instead[at]

    def again(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the op where its try succeeded, and give the same substitute where it failed."""
        at = self.at
        self.at = at + 1
        if at in self.reasons or self.skipped:
            return self.stand_in(at, arguments)
        return self.function(*arguments, **keywords)  # type: ignore[operator]

    def settle(self) -> Callable[..., Any]:
        """Return the function to call from now on: the op itself if every call of it can run."""
        if self.reasons or self.skipped or isinstance(self.function, str):
            return self.again
        return self.function


def _place(arguments: Sequence[Any]) -> torch.device:
    flat = [t for a in arguments for t in (a if isinstance(a, (list, tuple)) else [a])]
    return next((t.device for t in flat if isinstance(t, torch.Tensor)), device)
