"""Mutants: the list fits the code, and a test that fails is told from one that does not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.tools import mutants
from lab.tools.mutants import Mutant, read_mutants, try_mutant
from predictor.errors import InputError


def test_every_text_of_the_list_stands_once_in_its_file_and_every_test_is_there() -> None:
    found = read_mutants()
    assert len({mutant.name for mutant in found}) == len(found) >= 40
    for mutant in found:
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}" in (mutants.ROOT / file).read_text()


def test_a_text_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mutants.yaml"
    entry = "- {name: x, file: predictor/units.py, old: no such text, new: '', tests: [a]}\n"
    path.write_text(entry)
    with pytest.raises(InputError, match="no such text"):
        read_mutants(path)
    path.write_text("- {name: x}\n")
    with pytest.raises(InputError, match="file"):
        read_mutants(path)


@pytest.mark.parametrize(
    ("new", "test", "end"),
    [
        ("return 2", "test_one.py", "killed"),
        ("return 0 + 1", "test_one.py", "survived"),
        ("return 2", "test_none.py", "its tests did not run"),
        ("return (", "test_one.py", "its tests did not run"),
    ],
)
def test_how_a_mutant_ends(new: str, test: str, end: str, tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("def one():\n    return 1\n")
    (tmp_path / "test_one.py").write_text(
        "from one import one\n\ndef test_one():\n    assert one() == 1\n"
    )
    outcome = try_mutant(tmp_path, Mutant("m", "one.py", "return 1", new, (test,)))
    assert outcome.end.startswith(end)
    assert (tmp_path / "one.py").read_text().endswith("return 1\n")
