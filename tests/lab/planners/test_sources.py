"""The digest changes with the code that a row comes from, and with no other."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import predictor
import search
from lab.planners.rows import RANDOM, RATED, SHARDOPT, TORCHREC, sources_of


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the packages that may be changed."""
    for package in (predictor, search):
        assert package.__file__ is not None
        home = Path(package.__file__).parent
        there = tmp_path / home.name
        shutil.copytree(home, there, ignore=shutil.ignore_patterns("__pycache__"))
        monkeypatch.setattr(package, "__file__", str(there / "__init__.py"))
    return tmp_path


def digests() -> dict[str, str]:
    sources_of.cache_clear()
    found = {name: sources_of(name) for name in (TORCHREC, SHARDOPT, RATED, RANDOM)}
    sources_of.cache_clear()
    return found


def changed(copies: Path, file: str) -> set[str]:
    before, path = digests(), copies / file
    path.write_text(path.read_text() + "\n")
    after = digests()
    return {name for name in before if before[name] != after[name]}


def test_what_each_row_comes_from(copies: Path) -> None:
    assert digests() == digests()
    everything = {TORCHREC, SHARDOPT, RATED, RANDOM}
    assert changed(copies, "search/solve.py") == everything - {TORCHREC}
    assert changed(copies, "search/baselines/torchrec_planner.py") == everything
    assert changed(copies, "predictor/predict.py") == everything
    assert changed(copies, "predictor/hardware/profiles/h100-sxm.yaml") == everything
    (copies / "search/notes.txt").write_text("no code")
    assert changed(copies, "search/notes.txt") == set()


def test_a_copy_elsewhere_has_the_same_digest(
    copies: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = digests()
    monkeypatch.undo()
    assert digests() == there
