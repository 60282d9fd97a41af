"""The example notebook with its answers: its cells are run here, without Jupyter."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
from pathlib import Path
from pprint import pformat
from typing import Any

from shardopt.files import atomic_write_text

NOTEBOOK = "examples/quickstart.ipynb"


def write_notebook(root: Path) -> None:
    """Run the cells of the notebook in its folder, as Jupyter does, and put their answers there."""
    path = root / NOTEBOOK
    notebook = json.loads(path.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    before = os.getcwd()
    os.chdir(path.parent)
    try:
        for number, cell in enumerate(cells, start=1):
            cell["execution_count"] = number
            cell["outputs"] = run_cell("".join(cell["source"]), names, number)
    finally:
        os.chdir(before)
    atomic_write_text(path, json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", update=True)


def run_cell(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """Run a cell; return what it prints and the value of its last expression."""
    module = ast.parse(source)
    last = module.body.pop() if isinstance(module.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(module, NOTEBOOK, "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), NOTEBOOK, "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        lines = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    if value is not None:
        nested = isinstance(value, dict | list)
        text = pformat(value, width=100, sort_dicts=False) if nested else repr(value)
        data = {"text/plain": text.splitlines(keepends=True)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_().splitlines(keepends=True)
        outputs.append(
            {
                "data": data,
                "execution_count": number,
                "metadata": {},
                "output_type": "execute_result",
            }
        )
    return outputs
