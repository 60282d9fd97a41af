"""No mutation of a generated program makes its reader run anything."""

import ast
import copy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from predictor.errors import InputError
from shardopt.replay.generate import generate
from shardopt.replay.predict.source import read_program
from tests.shardopt.replay.captured import edited

KEPT_LINES = 2
"""Of each function of the program; the others are like these."""


class Ops:
    """Gives functions that do nothing."""

    forward = backward = staticmethod(lambda *_: None)

    def __call__(self, name: str, overload: str) -> Any:
        return lambda *_, **__: None

    def collective(self, kind: str) -> Any:
        return lambda *_, **__: None


def places(tree: ast.AST) -> Iterator[tuple[ast.AST, str, int | None]]:
    """Where nodes of statements and expressions are: their parent, field and place in a list."""
    for parent in ast.walk(tree):
        for field, value in ast.iter_fields(parent):
            if isinstance(value, list):
                yield from ((parent, field, at) for at in range(len(value)))
                yield parent, field, len(value)
            elif value is None or isinstance(value, ast.expr):
                yield parent, field, None


def mutate(tree: ast.Module, number: int, attack: ast.expr) -> ast.Module:
    """The tree with the attack at one place, in the form that the place takes."""
    made = copy.deepcopy(tree)
    parent, field, at = list(places(made))[number]
    forms: dict[str, ast.AST] = {
        "body": ast.Expr(attack),
        "orelse": ast.Expr(attack),
        "keywords": ast.keyword("group", attack),
        "args": ast.arg("t", attack) if isinstance(parent, ast.arguments) else attack,
        "posonlyargs": ast.arg("x", attack),
        "kwonlyargs": ast.arg("x", attack),
        "vararg": ast.arg("x", attack),
        "kwarg": ast.arg("x", attack),
        "names": ast.alias("antigravity"),
    }
    if sys.version_info >= (3, 12):
        forms["type_params"] = ast.TypeVar("x", attack)
    new = forms.get(field, attack)
    if at is None:
        setattr(parent, field, new)
    else:
        getattr(parent, field)[at : at + 1] = [new]
    return made


@pytest.fixture(scope="module")
def program(traces: Path, tmp_path_factory: pytest.TempPathFactory) -> ast.Module:
    """A generated program with a few lines in each function."""
    folder = tmp_path_factory.mktemp("benchmark")
    generate([edited(traces / "rank0.et.json", lambda _: None)], folder)
    tree = ast.parse((folder / "benchmark.py").read_text())
    functions = [of for of in tree.body if isinstance(of, ast.FunctionDef)]
    for function in functions:
        del function.body[1 + KEPT_LINES :]
    return tree


def test_nothing_runs_whatever_node_is_changed(
    program: ast.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, ran = tmp_path / "benchmark.py", []
    # anything that the program reaches beyond the constants of torch is noted
    monkeypatch.setattr(torch, "spy", lambda: ran.append(1), raising=False)
    attack = ast.parse("torch.spy()", mode="eval").body
    refused = accepted = 0
    for number in range(len(list(places(program)))):
        try:
            text = ast.unparse(ast.fix_missing_locations(mutate(program, number, attack)))
        except (AttributeError, KeyError, TypeError, ValueError):
            continue  # no such text
        path.write_text(text)
        try:
            read = read_program(path, Ops(), {"device": 0, "cpu": 0, "stream": 0})
        except InputError:
            refused += 1
            continue
        except (KeyError, NameError, TypeError, AttributeError):
            assert not ran, text
            continue
        accepted += 1
        for _, part in read.iteration:
            try:
                part([None] * 1000, [0] * 1000, [])
            except Exception:
                assert not ran, text
        assert not ran, text
    assert refused > 100
    assert accepted  # where the reader looks at nothing: imports, and what starts the program


def test_a_docstring_that_is_an_expression_is_refused(tmp_path: Path, program: ast.Module) -> None:
    path, marker = tmp_path / "benchmark.py", tmp_path / "marker"
    text = ast.unparse(program)
    first = next(line for line in text.splitlines() if line.startswith('    """'))
    path.write_text(text.replace(first, f"    torch.os.mkdir({str(marker)!r})"))
    with pytest.raises(InputError, match=r"benchmark\.py:\d+"):
        read_program(path, Ops(), {"device": 0, "cpu": 0, "stream": 0})
    assert not marker.exists()
