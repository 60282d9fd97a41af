"""Mutation testing: break the product, and run the tests that must notice each change.

    python -m lab mutants

A mutant is tried in a copy of the repository, never in the working tree. Results are stored by the
content of the packages and of the tests, so an interrupted run continues.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from predictor.errors import InputError
from shardopt.api.cache import code_digest

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.yaml")
KEPT = ROOT / ".nightly" / "mutants.jsonl"
COPIED = ("predictor", "search", "shardopt", "lab", "tests", "configs", "docs", "examples")
WORKERS = 2
FAILED = 1
"""Exit code of pytest where a test failed; others mean that it did not run."""


@checked(frozen=True, config=ConfigDict(extra="forbid"))
class Mutant:
    """Change that breaks the product.

    Args:
        name: resulting fault.
        file: path in the repository.
        old, new: text that occurs once, and its replacement.
        tests: node ids of pytest; at least one must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """Mutant with its end: ``killed``, ``survived`` or an error."""

    mutant: Mutant
    end: str


def read_mutants(path: Path = LIST) -> list[Mutant]:
    """Read the list, and check that every text occurs once in its file.

    Raises:
        InputError: an entry is incomplete, or its text does not occur once.
    """
    try:
        mutants = TypeAdapter(list[Mutant]).validate_python(yaml.safe_load(path.read_text("utf-8")))
    except ValidationError as error:
        raise InputError(f"{path.name}: {error}") from None
    for mutant in mutants:
        file = ROOT / mutant.file
        count = file.read_text("utf-8").count(mutant.old) if file.is_file() else 0
        if count != 1:
            raise InputError(
                f"{path.name}: {mutant.name!r}: {mutant.file} has its old text {count} times, not "
                f"once; give the text as it stands there now:\n{mutant.old}"
            )
    return mutants


def key_of(mutant: Mutant) -> str:
    """Return the digest of a mutant, of the packages and of the files of its tests."""
    digest = hashlib.sha256(repr(mutant).encode() + code_digest().encode())
    for file in sorted({test.partition("::")[0] for test in mutant.tests}):
        digest.update((ROOT / file).read_bytes())
    return digest.hexdigest()


def run_tests(folder: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run tests in a copy; return pytest's exit code and the end of its output."""
    python = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    words = ("-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", *tests)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words],
        cwd=folder,
        env={**os.environ, **python},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, f"{done.stdout}{done.stderr}"[-2000:]


def try_mutant(folder: Path, mutant: Mutant) -> Outcome:
    """Apply a mutant to a copy, run its tests and revert it."""
    file = folder / mutant.file
    text = file.read_text("utf-8")
    try:
        file.write_text(text.replace(mutant.old, mutant.new), "utf-8")
        code, shown = run_tests(folder, mutant.tests)
    finally:
        file.write_text(text, "utf-8")
    ends = {0: "survived", FAILED: "killed"}
    return Outcome(mutant, ends.get(code, f"its tests did not run: {shown}"))


def run_mutants(only: str, say: Callable[[str], None]) -> int:
    """Try the mutants whose name has a text; return exit code 1 if one is not killed.

    Raises:
        InputError: an entry of the list cannot be used, or a test fails without any mutant.
    """
    mutants = [mutant for mutant in read_mutants() if only in mutant.name]
    if not mutants:
        raise InputError(f"no mutant has {only!r} in its name")
    stored = _read_kept()
    ends = {m.name: stored[key] for m in mutants if (key := key_of(m)) in stored}
    pending = [mutant for mutant in mutants if mutant.name not in ends]
    with TemporaryDirectory(prefix="mutants-") as place:
        folders: SimpleQueue[Path] = SimpleQueue()
        for number in range(min(WORKERS, len(pending))):
            folders.put(_copy(Path(place) / str(number)))

        def one(mutant: Mutant) -> Outcome:
            folder = folders.get()
            try:
                return try_mutant(folder, mutant)
            finally:
                folders.put(folder)

        if pending:
            folder = folders.get()
            _check_unbroken(folder, pending)
            folders.put(folder)
        with ThreadPoolExecutor(WORKERS) as pool:
            for number, outcome in enumerate(pool.map(one, pending), len(ends) + 1):
                ends[outcome.mutant.name] = outcome.end
                _keep(outcome)
                say(f"{number} of {len(mutants)}: {outcome.mutant.name}: {outcome.end}")
    alive = [name for name, end in ends.items() if end != "killed"]
    say("\n".join([f"{len(mutants) - len(alive)} of {len(mutants)} mutants killed", *alive]))
    return 1 if alive else 0


def _check_unbroken(folder: Path, mutants: Sequence[Mutant]) -> None:
    """Run all tests without a mutant, as a test that fails anyway shows nothing.

    Raises:
        InputError: a test fails.
    """
    code, shown = run_tests(folder, sorted({test for m in mutants for test in m.tests}))
    if code:
        raise InputError(f"the tests do not pass without a mutant: {shown}")


def _copy(folder: Path) -> Path:
    folder.mkdir()
    ignored = shutil.ignore_patterns("__pycache__")
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file() and path.suffix in (".toml", ".md", ".cff", ""):
            shutil.copy(path, folder)
    return folder


def _read_kept() -> dict[str, str]:
    lines = KEPT.read_text("utf-8").splitlines() if KEPT.is_file() else []
    return dict(json.loads(line) for line in lines)


def _keep(outcome: Outcome) -> None:
    """Store a result; a test that did not run is tried again."""
    if outcome.end in ("killed", "survived"):
        KEPT.parent.mkdir(exist_ok=True)
        with KEPT.open("a", encoding="utf-8") as file:
            file.write(json.dumps([key_of(outcome.mutant), outcome.end]) + "\n")
