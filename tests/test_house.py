"""The rules of the house that no linter checks. The order of imports is in `make check`."""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("predictor", "search", "shardopt")
FOLDERS = (*PACKAGES, "lab", "examples", "tests", "configs", "docs", ".ci")
TEXT = {".py", ".toml", ".yaml", ".yml", ".md", ".cff", ".sh", ""}

MACHINE_PATH = re.compile(r"(?<![\w./~$}-])/(work|root|farm|home/\w+|Users/\w+|tmp/\w+)/")
"""A directory of one machine: at the start of a path, not inside a longer one or an address."""


def files(*folders: str, suffixes: set[str]) -> Iterator[Path]:
    """Files that people write, in these folders."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            hidden = path.name.startswith(".") or "__pycache__" in path.parts
            if path.is_file() and path.suffix in suffixes and not hidden:
                yield path


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def lines_with(pattern: re.Pattern[str], paths: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """Every line in which the pattern is found, with its place before it."""
    for path in paths:
        text = path.read_text(encoding="utf-8")
        if pattern.search(text):
            for number, line in enumerate(text.splitlines(), start=1):
                if pattern.search(line):
                    yield f"{relative(path)}:{number}: {line.strip()}", line


def test_no_path_of_one_machine() -> None:
    top = [p for p in ROOT.iterdir() if p.is_file() and p.suffix in TEXT and p.name[0] != "."]
    hits = [at for at, _ in lines_with(MACHINE_PATH, [*top, *files(*FOLDERS, suffixes=TEXT)])]
    assert not hits, "paths that exist on one machine only:\n" + "\n".join(hits)


def test_every_package_says_it_is_typed() -> None:
    assert all((ROOT / package / "py.typed").is_file() for package in PACKAGES)


def test_a_folder_says_what_lives_there() -> None:
    """And without __init__.py import-linter does not see a folder at all."""
    silent = []
    for folder in {path.parent for path in files(*PACKAGES, suffixes={".py"})}:
        init = folder / "__init__.py"
        if not init.is_file() or not ast.get_docstring(ast.parse(init.read_text("utf-8"))):
            silent.append(relative(folder))
    assert not silent, f"no __init__.py with a docstring: {sorted(silent)}"


def test_the_makefile_installs_what_the_extras_pin() -> None:
    """The torchrec that is added last must be one that the `cuda` extra allows too."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    pin = re.search(r"^TORCHREC := (torchrec==[\d.]+)$", makefile, re.M)
    assert pin
    assert f"pip install --no-deps {pin[1]}" in project


LOADS_CODE = {
    "shardopt/ranks/worker.py": "the job of the process that started this rank, in its own folder",
    "shardopt/torchrec/collective.py": "an error of this process, to see that it pickles",
}
"""Files that may unpickle, and what. No other file runs or unpickles anything that it reads."""
CODE_CALLS = {"exec", "eval", "compile", "__import__"}
CODE_METHODS = {"pickle.load", "pickle.loads", "marshal.loads", "runpy.run_path"}


def test_nothing_that_is_read_runs() -> None:
    """SECURITY.md promises it of every file that comes from elsewhere."""
    found = set()
    names = {name.partition(".")[0] for name in CODE_CALLS | CODE_METHODS}
    may_run = re.compile(rf"\b({'|'.join(sorted(names))}|torch\.load|yaml\.load|allow_pickle)\b")
    for path in files(*PACKAGES, suffixes={".py"}):
        source = path.read_text(encoding="utf-8")
        if not may_run.search(source):
            continue
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Call):
                continue
            called, words = ast.unparse(node.func), {k.arg: k.value for k in node.keywords}
            unsafe = called in CODE_CALLS | CODE_METHODS
            unsafe |= (
                called == "torch.load"
                and ast.unparse(words.get("weights_only", ast.Constant(None))) != "True"
            )
            loader = ast.unparse(words.get("Loader", ast.Constant(None)))
            unsafe |= called == "yaml.load" and "safe" not in loader.lower()
            unsafe |= "allow_pickle" in words and ast.unparse(words["allow_pickle"]) != "False"
            if unsafe:
                found.add(relative(path))
    assert found <= LOADS_CODE.keys()
