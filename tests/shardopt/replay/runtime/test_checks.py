"""Edited and cut data files: the message names the file."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from shardopt.replay.runtime.checks import naming, read


@pytest.mark.parametrize("text", ["", '{"rank": 0, "calls": [{"op', "[1]", "null"])
def test_data_that_is_cut_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = tmp_path / "rank0.json"
    path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        read(path)
    assert ended.value.code == 2
    assert "rank0.json: was cut off" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        read(tmp_path / "rank1.json")
    assert "rank1.json: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("data", "message"),
    [({}, "has no key 'calls'"), ({"calls": 3}, "TypeError"), ({"calls": []}, "IndexError")],
)
def test_data_of_another_form(
    capsys: pytest.CaptureFixture[str], data: dict[str, Any], message: str
) -> None:
    with pytest.raises(SystemExit), naming("rank0.json"):
        print(data["calls"][0])
    err = capsys.readouterr().err
    assert err.startswith("rank0.json: ")
    assert message in err
