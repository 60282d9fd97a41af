"""The registry: every suite has its function, its help and its place in the docs."""

from importlib import import_module
from pathlib import Path

import pytest

from lab import suites
from lab.cli import main
from lab.suites import ALL, SUITES, find_suites, run_suites
from predictor.errors import InputError

ROOT = Path(__file__).resolve().parents[2]


def test_every_suite_has_its_function() -> None:
    for suite in SUITES:
        function = f"validate_{suite.name.replace('-', '_')}"
        assert callable(getattr(import_module(suite.builder), function))


@pytest.mark.parametrize("page", ["docs/data.md", "docs/accuracy.md"])
def test_the_docs_have_every_suite(page: str) -> None:
    text = (ROOT / page).read_text()
    assert not [suite.name for suite in SUITES if suite.name not in text]


def test_the_help_lists_every_suite(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert not [suite.name for suite in SUITES if f"{suite.name} (" not in text]


def test_public_suites_ask_for_their_files(capsys: pytest.CaptureFixture[str]) -> None:
    for suite in SUITES:
        if not suite.committed:
            assert main(["validate", suite.name]) == 2
            assert "flags: --data" in capsys.readouterr().err


def test_all_gives_data_to_the_public_suites_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = {}
    monkeypatch.setattr(
        suites.Suite, "run", lambda suite, data=None: given.update({suite.name: data})
    )
    run_suites(ALL, tmp_path)
    assert given == {suite.name: None if suite.committed else tmp_path for suite in SUITES}


def test_an_unknown_suite() -> None:
    with pytest.raises(InputError, match="did you mean 'gemm'"):
        find_suites("gem")
