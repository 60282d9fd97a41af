"""The page and the files beside it."""

from pathlib import Path

from lab.pages.accuracy import SUMMARY, write_accuracy
from lab.validate.report import ComparedRow, Report, Scores, noise_of

ROWS = (
    ComparedRow({"gpu": "H100", "commit": "abc"}, 1.0, 1.1, "f"),
    ComparedRow({"gpu": "B200", "dim": 64}, 2.0, 2.2, "f", interval_ms=(1.9, 2.5), source="s"),
)


def test_rows_of_several_files_have_columns_of_their_own(tmp_path: Path) -> None:
    further = Scores(
        "by GPU", (("gpu", "text"), ("gain", "share")), (("H100", 0.5), ("B200", None))
    )
    noise = {"other dates": noise_of([(1, 1.0), (1, 1.1)])}
    report = Report("tbe", ROWS, "test", ("a row",), scores=(further,), noise=noise)
    write_accuracy(tmp_path / "accuracy.md", [report])
    folder = tmp_path / "accuracy"
    assert (folder / "tbe.csv").read_text().splitlines() == [
        "part,gpu,commit,dim,measured_ms,predicted_ms,low_ms,high_ms,error,source",
        "test,H100,abc,,1.0,1.1,,,0.1,",
        "test,B200,,64,2.0,2.2,1.9,2.5,0.1,s",
    ]
    assert (folder / "tbe-by-gpu.csv").read_text() == "gpu,gain\nH100,0.5\nB200,\n"
    summary = (folder / SUMMARY).read_text().splitlines()
    assert summary[1] == "tbe,test,1,2,0.1,0.1,0.1,1.0"
    assert summary[2].startswith("tbe,noise: other dates,0,2,")
    page = (tmp_path / "accuracy.md").read_text()
    assert "| test * | 2 | 10.0 % | 10.0 % | 10.0 % | 100.0 % |" in page
    assert "2 rows (1 left out): [tbe.csv](accuracy/tbe.csv), [tbe-by-gpu.csv]" in page
