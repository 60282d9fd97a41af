"""The suites as data: each has its builder, its help and its place in the docs; and reports."""

from importlib import import_module
from pathlib import Path

import pytest

from lab import suites
from lab.cli import main
from lab.suites import ALL, SUITES, ComparedRow, Report, Summary, find_suites, noise_of, run_suites
from predictor.errors import InputError

ROOT = Path(__file__).resolve().parents[2]


def test_every_suite_has_its_function() -> None:
    for suite in SUITES.values():
        function = f"validate_{suite.name.replace('-', '_')}"
        assert callable(getattr(import_module(suite.builder), function))


@pytest.mark.parametrize("page", ["docs/data.md", "docs/accuracy.md"])
def test_the_docs_have_every_suite(page: str) -> None:
    text = (ROOT / page).read_text()
    assert not [name for name in SUITES if name not in text]


def test_the_help_lists_every_suite(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert not [name for name in SUITES if f"{name} (" not in text]


def test_public_suites_ask_for_their_files(capsys: pytest.CaptureFixture[str]) -> None:
    for suite in SUITES.values():
        if not suite.committed:
            assert main(["validate", suite.name]) == 2
            assert "flags: --data" in capsys.readouterr().err


def test_all_gives_data_to_the_public_suites_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders = {}
    monkeypatch.setattr(
        suites.Suite, "run", lambda suite, data=None: folders.update({suite.name: data})
    )
    run_suites(ALL, tmp_path)
    assert folders == {n: None if suite.committed else tmp_path for n, suite in SUITES.items()}


def test_an_unknown_suite() -> None:
    with pytest.raises(InputError, match="'gemm'"):
        find_suites("gem")


def test_missing_files_are_named(tmp_path: Path) -> None:
    every = SUITES["mlperf-dlrm"]
    first, *missing = every.tables
    (tmp_path / first).touch()
    with pytest.raises(InputError, match=missing[0]):
        every.run(tmp_path)


def compared(measured: float, predicted: float, part: str = "test") -> ComparedRow:
    return ComparedRow({"name": "x"}, measured, predicted, family="f", part=part)


def test_intervals_are_counted_where_there_are_any() -> None:
    inside, outside = ((0.9, 1.1), (1.1, 1.2))
    rows = [
        ComparedRow({}, 1.0, 1.0, "f", interval_ms=interval)
        for interval in (inside, inside, outside, None)
    ]
    assert Summary.of(rows).covered == pytest.approx(2 / 3)
    assert Summary.of(rows[3:]).figures[3] != Summary.of(rows[3:]).figures[3], "no number"


def test_noise_is_that_of_repeats_alone() -> None:
    """Each repeat against the median of the others."""
    noise = noise_of([("a", 1.0), ("a", 1.25), ("b", 7.0), ("c", 3.0), ("c", 3.0), ("c", 6.0)])
    assert noise.n == 5
    errors = [1.25 / 1.0 - 1, 1.0 / 1.25 - 1, 4.5 / 3 - 1, 4.5 / 3 - 1, 3 / 6 - 1]
    assert noise.mape == pytest.approx(sum(map(abs, errors)) / 5)


def test_the_headline_counts_its_own_part_only() -> None:
    report = Report("s", (compared(1, 2), compared(1, 1.1, "fit")), "test")
    assert (report.summary.n, report.summary.mape) == (1, 1.0)
    assert set(report.by_part()) == {"test", "fit"}
    assert report.by_family()["fit", "f"].n == 1
    assert [row.part for row in report.listed] == ["test"]


def test_tables_and_notes_have_the_words_of_the_suite() -> None:
    suite = SUITES["transformers-cpu"]
    facts = {"ranks": 2, "call_us": 1.26, "stretch": 0.05}
    table = suite.table("ops", [("mul", 0.5, 0.1)], **facts)
    assert (table.name, table.columns[1]) == ("ops_2", ("share of step", "share"))
    assert "1.3 us" in table.about
    report = suite.report([], scores=[table, suite.table("steps", [])], notes=["more"])
    assert report.scores == (table,), "a table without rows is left out"
    assert report.notes[-1] == "more"
    assert report.headline == suite.headline
