"""Private names of TorchRec that are used: they exist, and no others are used."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torchrec

from shardopt.torchrec.private import TOUCHED, Private

ROOT = Path(__file__).parents[3] / "shardopt"
TORCH = {"_C", "_cdata", "_ops", "_schema", "_subclasses"}
TORCH |= {"_current_autograd_node", "_get_sequence_nr", "_sequence_nr"}
"""Of PyTorch itself, in what records ops."""
PYTHON = {"_asdict", "_fields", "_replace"}
EXTENDED = {name for t in TOUCHED for name in t.names}


def source_of(name: str) -> str:
    """Return the source of a module, or of a class in one."""
    try:
        value: Any = import_module(name)
    except ModuleNotFoundError:
        module, _, member = name.rpartition(".")
        value = getattr(import_module(module), member)
    return inspect.getsource(value)


@pytest.mark.parametrize("touched", TOUCHED, ids=lambda t: f"{t.source}: {', '.join(t.names)}")
def test_the_installed_version_has_what_is_touched(touched: Private) -> None:
    version = torchrec.__version__
    if tuple(map(int, version.split(".")[:2])) < tuple(map(int, touched.since.split("."))):
        pytest.skip(f"new in torchrec {touched.since}")
    source = source_of(touched.source)
    missing = [name for name in touched.names if name not in source]
    assert not missing, f"torchrec {version} has no {missing} in {touched.source}"


def private_names(tree: ast.AST) -> set[str]:
    """Taken off another object than ``self``, or by a text."""
    attributes = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    }
    looked_up = {
        node.args[1].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr")
        and isinstance(node.args[1], ast.Constant)
    }
    names = {str(name) for name in attributes | looked_up}
    own = {
        part
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        for part in [node.name]
    }
    return {n for n in names if n.startswith("_") and not n.startswith("__")} - own


@pytest.mark.parametrize("room", ["torchrec", "live", "training"])
def test_private_names_stand_in_one_file(room: str) -> None:
    for path in sorted((ROOT / room).rglob("*.py")):
        if path.name != "private.py":
            names = private_names(ast.parse(path.read_text())) - TORCH - PYTHON
            assert not names, f"{path}: put them into shardopt/torchrec/private.py"


@pytest.mark.parametrize("file", ["torchrec/hook.py", "training/cpu_collection.py"])
def test_what_a_class_uses_of_the_one_it_extends_is_listed(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    written = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    methods = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    read = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
    }
    assert read - written - methods - PYTHON <= EXTENDED
