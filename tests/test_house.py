"""The rules of the house that no linter checks. The staircase itself is in `make check`."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("predictor", "search", "shardopt")
FOLDERS = (*PACKAGES, "tools", "examples", "tests", "configs", "docs", ".ci")
TEXT = {".py", ".toml", ".yaml", ".yml", ".md", ".cff", ".sh", ""}

MAX_LINES = 400
MAX_COLUMNS = 100
# Python files that hold data and no logic; they may be as long as their data.
DATA_TABLES: frozenset[str] = frozenset()
# A directory of one machine: at the start of a path, not inside a longer one or an address.
FLAG = re.compile(r"(?<![\w-])--[a-z]")
# Programs of their own, and the words that start them: their flags are not those of `shardopt`.
OTHER_PROGRAMS = (
    "shardopt/replay/runtime/",
    "shardopt/replay/launch.py",
    "shardopt/replay/program/emit.py",
    "shardopt/replay/predict/op_list.py",
    "shardopt/bench/planners/compare.py",
    "shardopt/extras.py",  # pip
)
# Texts of generated documents, which name the command that wrote them.
DOCUMENTS = (
    "shardopt/report/accuracy/page.py",
    "shardopt/report/bench/planners_page.py",
    "shardopt/bench/planners/rows.py",
)
MACHINE_PATH = re.compile(r"(?<![\w./~$}-])/(work|root|farm|home/\w+|Users/\w+|tmp/\w+)/")


def source_files() -> Iterator[Path]:
    """Every text file of the project that people write, generated and cached ones apart."""
    yield from (path for path in ROOT.iterdir() if path.is_file() and wanted(path))
    for folder in FOLDERS:
        yield from (path for path in (ROOT / folder).rglob("*") if path.is_file() and wanted(path))


def wanted(path: Path) -> bool:
    return path.suffix in TEXT and not path.name.startswith(".") and "__pycache__" not in path.parts


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def python_files() -> list[Path]:
    return [path for path in source_files() if path.suffix == ".py"]


def test_the_walk_finds_the_project() -> None:
    found = {relative(path) for path in source_files()}
    assert {"pyproject.toml", "Makefile", ".ci/run", "shardopt/__init__.py"} <= found


def test_no_python_file_is_longer_than_a_reader_can_hold() -> None:
    lines = {relative(path): len(path.read_text().splitlines()) for path in python_files()}
    long = {name: n for name, n in lines.items() if n > MAX_LINES and name not in DATA_TABLES}
    assert not long, f"more than {MAX_LINES} lines: split by idea, not by length: {long}"


def test_no_line_is_too_wide() -> None:
    wide = [
        f"{relative(path)}:{number}"
        for path in python_files()
        if relative(path) not in DATA_TABLES
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if len(line) > MAX_COLUMNS
    ]
    assert not wide, f"more than {MAX_COLUMNS} columns: {wide}"


def test_no_path_of_one_machine() -> None:
    hits = [
        f"{relative(path)}:{number}: {line.strip()}"
        for path in source_files()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if MACHINE_PATH.search(line)
    ]
    assert not hits, "paths that exist on one machine only:\n" + "\n".join(hits)


def texts(tree: ast.Module) -> Iterator[ast.Constant]:
    """String literals of a module; docstrings, which no user reads, are none."""
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if text and id(node) not in docstrings:
            yield node


def test_flags_are_named_by_the_command_line_alone() -> None:
    """A script or the TorchRec hook raises the same errors: `ShardoptError.inputs` names what to
    change, and `shardopt.cli` shows the flags."""
    excused = ("shardopt/cli/", *OTHER_PROGRAMS, *DOCUMENTS)
    hits = [
        f"{relative(path)}:{node.lineno}: {node.value!r}"
        for path in python_files()
        if relative(path).startswith(PACKAGES) and not relative(path).startswith(excused)
        if FLAG.search(source := path.read_text())
        for node in texts(ast.parse(source))
        if FLAG.search(str(node.value))
    ]
    assert not hits, "flags outside shardopt/cli:\n" + "\n".join(hits)


def test_every_package_says_it_is_typed() -> None:
    assert all((ROOT / package / "py.typed").is_file() for package in PACKAGES)


def test_every_directory_of_code_is_a_package() -> None:
    """Without __init__.py import-linter does not see a directory, and nothing guards it."""
    code = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    assert not [relative(folder) for folder in code if not (folder / "__init__.py").is_file()]


def test_the_makefile_installs_what_the_extras_pin() -> None:
    """The torchrec that is added last must be one that the `cuda` extra allows too."""
    project = (ROOT / "pyproject.toml").read_text()
    pin = re.search(r"^TORCHREC := (torchrec==[\d.]+)$", (ROOT / "Makefile").read_text(), re.M)
    assert pin
    assert f"pip install --no-deps {pin[1]}" in project
