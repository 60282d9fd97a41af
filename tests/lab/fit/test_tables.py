"""The command that prints constants fitted to the public tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.fit.tables import main


def test_a_missing_folder_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--data", str(tmp_path / "none")])
    assert caught.value.code == 2
    assert "no such folder" in capsys.readouterr().err
    assert main(["--data", str(tmp_path)]) == 0
    assert capsys.readouterr().out == ""
