"""The rules of the house for its rooms: folders of modules, and the tests that mirror them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("predictor", "search", "shardopt")
MIRRORED = (*PACKAGES, "tools")
MOST_MODULES = 15

CROSS_CUTTING = {
    # several modules at once, as their user meets them
    "predictor/cost/test_loads_fused.py",
    "predictor/iteration/test_timeline_threads.py",
    "predictor/iteration/torchrec/test_dlrm_waits.py",
    "search/test_oracle.py",
    "search/tune/test_workers.py",
    "shardopt/calibrate/kernels/test_measure_kernels.py",
    "shardopt/cli/test_bad_input.py",
    "shardopt/cli/test_fuzz.py",
    "shardopt/cli/test_golden.py",
    "shardopt/cli/test_hardware_and_diff.py",
    "shardopt/cli/test_plan_from.py",
    "shardopt/cli/test_strict.py",
    "shardopt/config/test_model_errors.py",
    "shardopt/replay/kineto/test_parts.py",
    "shardopt/replay/test_privacy.py",
    "shardopt/replay/test_tensors_made.py",
    "shardopt/report/html/test_browser.py",
    "shardopt/stats/test_prediction.py",
    "shardopt/stats/test_sources.py",
    "shardopt/test_import.py",
    "shardopt/torchrec/test_hook_doc.py",
    "shardopt/validate/mlperf/test_mlperf.py",
    "shardopt/validate/test_collectives_and_gemm.py",
    # damaged input
    "predictor/hardware/test_profile_fuzz.py",
    "predictor/trace/test_fuzz.py",
    "shardopt/config/test_fuzz.py",
    "shardopt/validate/test_fuzz_tables.py",
    # data outside the repository
    "predictor/trace/test_public_traces.py",
    # a helper of the tests
    "shardopt/replay/test_differences.py",
}
"""Tests under `MIRRORED` that are of no one module."""

BLANKET = re.compile(r"""(filterwarnings|simplefilter)\(\s*["']ignore["']\s*\)""")
PATH_HACK = re.compile(r"sys\.path\.(insert|append|extend)|sys\.path\[")
SLEEPERS = {
    "tests/distributed/ranks.py": "the end of a process that no other waits for",
    "tests/search/test_side_by_side.py": "ends in another order; hangs until it is interrupted",
    "tests/search/tune/test_storage.py": "a lease that runs out; a poll",
    "tests/search/tune/worker.py": "hangs until it is killed",
    "tests/shardopt/cli/test_app.py": "an interrupt at any moment has the same words",
    "tests/shardopt/ranks/test_hung.py": "hangs until it is killed; a poll",
    "tests/shardopt/ranks/test_scratch.py": "hangs until it is killed",
    "tests/shardopt/ranks/test_launch.py": "hangs until it is killed; a poll",
    "tests/shardopt/ranks/test_calls.py": "hangs until its time is over",
    "tests/shardopt/test_files.py": "hangs until it is killed",
    "tests/shardopt/replay/test_launch.py": "hangs until it is killed; a poll",
}
"""Files that sleep, and why no slow machine breaks them: a test waits for what it needs."""


def folders() -> Iterator[Path]:
    for package in PACKAGES:
        yield from sorted({path.parent for path in (ROOT / package).rglob("*.py")})


def files_of_tests() -> Iterator[Path]:
    yield from sorted((ROOT / "tests").rglob("*.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_a_folder_is_small_enough_to_see() -> None:
    sizes = {
        relative(folder): len([p for p in folder.glob("*.py") if p.name != "__init__.py"])
        for folder in folders()
    }
    large = {name: n for name, n in sizes.items() if n > MOST_MODULES}
    assert not large, f"more than {MOST_MODULES} modules: make rooms inside: {large}"


def test_a_folder_says_what_lives_there() -> None:
    silent = [
        relative(folder)
        for folder in folders()
        if not ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))
    ]
    assert not silent, f"__init__.py without a docstring: {silent}"


def test_tests_mirror_the_sources() -> None:
    """``tests/a/b/test_c.py`` is of ``a/b/c.py``, or of the folder ``a/b/c``."""
    found = {
        path.relative_to(ROOT / "tests").as_posix(): path
        for package in MIRRORED
        for path in (ROOT / "tests" / package).rglob("test_*.py")
    }
    astray = []
    for name, path in found.items():
        mirrored = ROOT / Path(name).parent / path.stem.removeprefix("test_")
        if not (mirrored.with_suffix(".py").is_file() or (mirrored / "__init__.py").is_file()):
            astray.append(name)
    assert sorted(set(astray) - CROSS_CUTTING) == [], "tests of no module: move them with it"


def test_tests_import_no_tests() -> None:
    """What two tests share lies in a module of its own, which says so."""
    imports = re.compile(r"^\s*(?:from|import)\s+(?:[\w.]*\.)?test_\w+", re.M)
    found = [relative(p) for p in files_of_tests() if imports.search(p.read_text(encoding="utf-8"))]
    assert not found, f"tests that import tests: {found}"


@pytest.mark.parametrize(
    ("what", "pattern"), [("a blanket ignore", BLANKET), ("a path that is patched", PATH_HACK)]
)
def test_tests_hide_nothing(what: str, pattern: re.Pattern[str]) -> None:
    found = [
        relative(path)
        for path in files_of_tests()
        if path != Path(__file__).resolve() and pattern.search(path.read_text(encoding="utf-8"))
    ]
    assert not found, f"{what}: {found}"


def test_only_known_tests_sleep() -> None:
    sleeps = re.compile(r"\btime\.sleep\b")
    found = {relative(p) for p in files_of_tests() if sleeps.search(p.read_text(encoding="utf-8"))}
    assert found - SLEEPERS.keys() - {relative(Path(__file__))} == set()
