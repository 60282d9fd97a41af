"""A generated program as data: read from its text, statement by statement, and never imported.

Whoever is sent a benchmark predicts it before trusting it. What `shardopt.replay.program.emit`
writes are calls of PyTorch's ops on numbered tensors; a text that holds anything else is refused.

Why: docs/decisions/0049.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from predictor.errors import InputError
from shardopt.files import decode, read_bytes
from shardopt.replay.program.literals import DTYPES, FORMATS, LAYOUTS

ARGUMENTS = ("t", "c", "work")
TORCH = frozenset({*DTYPES.values(), *LAYOUTS.values(), *FORMATS.values()})
MAKERS = ("forward", "backward")


@dataclass(frozen=True)
class ReadProgram:
    """What the module of a program would hold.

    Args:
        iteration: names of annotations, and the function, of each part.
    """

    iteration: Sequence[tuple[tuple[str, ...], Any]]


def read_program(path: Path, ops: Any, words: dict[str, Any]) -> ReadProgram:
    """The program in a file.

    Args:
        ops: finds the ops that it names; a `shardopt.replay.runtime.ops.Ops`.
        words: the values of ``device``, ``cpu`` and ``stream``.

    Raises:
        InputError: the file cannot be read, or holds what `bench generate` does not write.
    """
    text = decode(read_bytes(path, "program"), path)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{path}: is no program: {error}") from None
    reader = _Reader(path, set(words))
    for statement in reader.after_docstring(tree):
        reader.top(statement)
    # every statement has been checked: it makes and calls ops of PyTorch, on tensors; there is no
    # module among the names through which anything else could be reached
    module = ast.Module(reader.kept, [])
    constants = SimpleNamespace(**{name: getattr(torch, name) for name in TORCH})
    names: dict[str, Any] = {"__builtins__": {"float": float}, "torch": constants, "ops": ops}
    names |= words
    exec(compile(module, str(path), "exec"), names)
    return ReadProgram(names["ITERATION"])


class _Reader:
    """Checks statements; ``kept`` are those that make the ops, the parts and their list."""

    def __init__(self, path: Path, words: set[str]) -> None:
        self.path = path
        self.known = words
        self.parts: set[str] = set()
        self.kept: list[ast.stmt] = []

    def top(self, statement: ast.stmt) -> None:
        """A statement of the module."""
        match statement:
            case ast.Import() | ast.ImportFrom() | ast.If():
                return  # torch, the runtime, and what runs it
            case ast.Assign(targets=[ast.Name(id="ops")]):
                return
            case ast.Assign(targets=[ast.Name(id="ITERATION")], value=ast.List(elts=parts)):
                for part in parts:
                    self._part(part)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._op(value)
                self.known.add(name)
            case ast.FunctionDef(name=name):
                self._signature(statement)
                for inner in self.after_docstring(statement):
                    self._line(inner)
                self.parts.add(name)
            case _:
                self._refuse(statement)
        self.kept.append(statement)

    def after_docstring(self, of: ast.Module | ast.FunctionDef) -> list[ast.stmt]:
        """The statements of a body after its docstring, which it must have."""
        match of.body:
            case [ast.Expr(value=ast.Constant(value=str())), *rest]:
                return rest
            case [first, *_]:
                self._refuse(first)
        raise InputError(f"{self.path}: is empty; generate the benchmark again")

    def _part(self, part: ast.expr) -> None:
        match part:
            case ast.Tuple(elts=[ast.Tuple(elts=names), ast.Name(id=function)]):
                if function in self.parts and all(isinstance(n, ast.Constant) for n in names):
                    return
        self._refuse(part)

    def _op(self, value: ast.expr) -> None:
        match value:
            case ast.Call(func=ast.Name(id="ops"), args=args, keywords=[]):
                pass
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="ops"), attr="collective"),
                args=args,
                keywords=[],
            ):
                pass
            case ast.Attribute(value=ast.Name(id="ops"), attr=attr) if attr in MAKERS:
                return
            case _:
                self._refuse(value)
        if not all(isinstance(a, ast.Constant) and isinstance(a.value, str) for a in args):
            self._refuse(value)

    def _signature(self, part: ast.FunctionDef) -> None:
        given = part.args
        names = tuple(of.arg for of in given.args)
        others = (
            *(given.posonlyargs, given.kwonlyargs, given.vararg, given.kwarg),
            *(
                given.defaults,
                given.kw_defaults,
                [of.annotation for of in given.args if of.annotation],
            ),
            *(part.decorator_list, part.returns, getattr(part, "type_params", None)),
        )
        if names != ARGUMENTS or any(others):
            self._refuse(part)

    def _line(self, line: ast.stmt) -> None:
        match line:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._place(target)
                self._value(value)
            case ast.Expr(value=ast.Call() as call):
                self._value(call)
            case _:
                self._refuse(line)

    def _place(self, target: ast.expr) -> None:
        match target:
            case ast.Name(id="_"):
                pass
            case ast.Tuple(elts=items) | ast.List(elts=items):
                for item in items:
                    self._place(item)
            case ast.Subscript(value=ast.Name(id="t"), slice=ast.Constant(value=int())):
                pass
            case _:
                self._refuse(target)

    def _value(self, value: ast.expr) -> None:
        match value:
            case ast.Constant():
                pass
            case ast.Name(id=name) if name in self.known:
                pass
            case ast.Attribute(value=ast.Name(id="torch"), attr=attr) if attr in TORCH:
                pass
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant()):
                pass
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int())):
                if name not in ARGUMENTS:
                    self._refuse(value)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                for item in items:
                    self._value(item)
            case ast.Call():
                self._call(value)
            case _:
                self._refuse(value)

    def _call(self, call: ast.Call) -> None:
        match call.func:
            case ast.Name(id="float"):
                pass
            case ast.Name(id=name) if name in self.known:
                pass
            case ast.Attribute(value=ast.Name(id="work"), attr="append"):
                pass
            case ast.Attribute(value=ast.Subscript(value=ast.Name(id="work")), attr="wait"):
                pass
            case _:
                self._refuse(call)
        for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
            self._value(argument)
        if any(keyword.arg is None for keyword in call.keywords):
            self._refuse(call)

    def _refuse(self, node: ast.stmt | ast.expr) -> NoReturn:
        raise InputError(
            f"{self.path}:{node.lineno}: is not what `bench generate` writes, and no code of a "
            "benchmark is run to predict it; generate the benchmark again"
        )
