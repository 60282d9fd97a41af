"""docs/api.md: the names that users import, from their docstrings; it imports nothing."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"shardopt": "_HOME_OF", "shardopt.torchrec": "_HOMES"}
"""Package that users import -> the table of its names and the modules that hold them."""
HEAD = """# The Python API

Made by `python -m lab pages` from the docstrings; do not edit this page. Names load on first use:
`import shardopt` imports no torch.
"""
SECTION = re.compile(r"(Args|Returns|Raises|Yields|Example|Examples|Attributes|Keys):$")
ENTRY = re.compile(r"([\w*, ]+?)(?: \(.*\))?: (.*)$")

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def api_text() -> str:
    """Return the page."""
    text = "\n".join([HEAD, *_lines()])
    return re.sub(r"\n{3,}", "\n\n", text).rstrip("\n") + "\n"


def _lines() -> Iterator[str]:
    names_of = {package: sorted(public_names(package).items()) for package in PACKAGES}
    first = dict.fromkeys(name for name, _ in names_of["shardopt"])
    for package, names in names_of.items():
        yield f"## {package}\n"
        for name, module in names:
            if package != "shardopt" and name in first:
                yield f"`{name}`: as `shardopt.{name}`.\n"
                continue
            yield from _entry(package, name, definition(module, name))


def public_names(package: str) -> dict[str, str]:
    """Return name -> module, from the package's own table."""
    for node in ast.walk(_tree(package)):
        targets = node.targets if isinstance(node, ast.Assign) else ()
        if any(
            isinstance(target, ast.Name) and target.id == PACKAGES[package] for target in targets
        ):
            assert isinstance(node, ast.Assign)
            table: dict[str, str] = ast.literal_eval(node.value)
            if package == "shardopt":
                return table
            return {name: module for module, names in table.items() for name in names.split()}
    raise LookupError(f"{package} has no table {PACKAGES[package]}")


@cache
def _tree(module: str) -> ast.Module:
    stem = ROOT.joinpath(*module.split("."))
    file = stem / "__init__.py" if stem.is_dir() else stem.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def definition(module: str, name: str) -> Definition:
    """Return the function or class of a module, or of the module that it imports it from."""
    for node in _tree(module).body:
        if isinstance(node, Definition) and node.name == name:
            return node
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return definition(node.module, alias.name)
    raise LookupError(f"{module} does not define {name}")


def _entry(package: str, name: str, node: Definition) -> Iterator[str]:
    yield f"### {package}.{name}\n"
    yield "```python"
    yield _signature(node, name)
    yield "```\n"
    yield from _documented(ast.get_docstring(node))
    if not isinstance(node, ast.ClassDef):
        return
    described = list(_described_fields(node))
    yield from ["Args:\n", *described, ""] if described else []
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_"):
            words = (ast.get_docstring(method) or "").partition("\n\n")[0]
            is_value = any(ast.unparse(d).endswith("property") for d in method.decorator_list)
            shown = method.name if is_value else _one_line(_signature(method, method.name))
            shown = shown.replace("( ", "(").replace(", )", ")")
            yield f"- `{shown}`: {_markdown(_one_line(words))}"
    yield ""


def _signature(node: Definition, name: str) -> str:
    """Return the call as it is written: parameters with types and defaults, without ``self``."""
    if isinstance(node, ast.ClassDef):
        constructors = [
            m for m in node.body if isinstance(m, ast.FunctionDef) and m.name == "__init__"
        ]
        if constructors:
            return _signature(constructors[0], name)
        fields = [field for field in node.body if isinstance(field, ast.AnnAssign)]
        shown = (
            f"{ast.unparse(field.target)}: {ast.unparse(_type(field))}"
            f"{f' = {ast.unparse(field.value)}' if field.value else ''}"
            for field in fields
            if not ast.unparse(field.annotation).startswith("ClassVar")
        )
        return _wrapped(name, list(shown), "")
    arguments = ast.unparse(node.args)
    listed = [part for part in _parts(arguments) if part != "self"]
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    return _wrapped(name, listed, returns)


def _type(field: ast.AnnAssign) -> ast.expr:
    kind = field.annotation
    if isinstance(kind, ast.Subscript) and ast.unparse(kind.value) == "Annotated":
        assert isinstance(kind.slice, ast.Tuple)
        return kind.slice.elts[0]
    return kind


def _described_fields(node: ast.ClassDef) -> Iterator[str]:
    """Yield the texts below fields."""
    for field, text in pairwise(node.body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            words = _one_line(ast.literal_eval(text.value))
            yield f"- `{ast.unparse(field.target)}`: {_markdown(words)}"


def _parts(arguments: str) -> list[str]:
    """Split a list of parameters at commas outside brackets."""
    parts, depth = [""], 0
    for letter in arguments:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def _wrapped(name: str, parts: list[str], returns: str) -> str:
    line = f"{name}({', '.join(parts)}){returns}"
    if len(line) <= 96:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){returns}"])


def _documented(text: str | None) -> Iterator[str]:
    """Yield a docstring as Markdown: its sections become lists."""
    lines = inspect.cleandoc(text or "").splitlines()
    section, entry = "", ""
    for line in lines:
        started = SECTION.match(line)
        if started:
            section = started[1]
            yield from _flushed(entry)
            entry = ""
            yield f"\n{section}:\n"
        elif not section:
            yield _markdown(line)
        elif ENTRY.match(line.strip()) and line.startswith("    ") and line[4:5] != " ":
            yield from _flushed(entry)
            entry = line.strip()
        else:
            entry = f"{entry} {line.strip()}".strip()
    yield from _flushed(entry)
    yield ""


def _flushed(entry: str) -> Iterator[str]:
    if not entry:
        return
    match = ENTRY.match(entry)
    yield f"- `{match[1]}`: {_markdown(match[2])}" if match else f"- {_markdown(entry)}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _markdown(text: str) -> str:
    return text.replace("``", "`")
