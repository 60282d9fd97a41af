"""`python -m lab search`: planners on a suite of instances."""

from pathlib import Path

import pytest

SUITE = """\
schema: 1
torchrec_limit_s: 30
variant_limit_s: 30
rival_limit_s: 10
instances:
  - {tables: 5, gpus: 2, fill: 0.5, seeds: [1]}
"""


@pytest.mark.slow
def test_a_suite_is_run_and_taken_up_again(run, tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    suite, rows, page = tmp_path / "s.yaml", tmp_path / "r.csv", tmp_path / "b.md"
    suite.write_text(SUITE)
    words = ("search", suite, "-o", rows, "--effort", 0.05)
    some = run(*words, "--planners", "torchrec,neuroshard")
    assert some.code == 0, some.err
    assert "2 of 2: 5x2-fill50-1, neuroshard" in some.err
    done = run(*words, "--write-docs", page)
    assert done.code == 0, done.err
    assert "1 of 8: 5x2-fill50-1, torchrec dynamic" in done.err
    assert "By TorchRec's rating" in done.out
    assert page.read_text().startswith("# Benchmarks of the search")
    assert rows.read_text().count("5x2-fill50-1") == 10
    before = rows.read_bytes()
    again = run(*words, "--quiet")
    assert (again.code, again.err) == (0, "")
    assert rows.read_bytes() == before


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("s.yaml",), "-o"),
        (("s.yaml", "-o", "r.csv", "--planners", "torchrek"), "did you mean 'torchrec'"),
        (("none.yaml", "-o", "r.csv"), "none.yaml: no such instances file"),
    ],
)
def test_bad_flags_of_a_suite(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[object, ...], told: str
) -> None:
    pytest.importorskip("torchrec")
    monkeypatch.chdir(tmp_path)
    Path("s.yaml").write_text(SUITE)
    done = run("search", *words)
    assert (done.code, done.out) == (2, "")
    assert told in done.err
