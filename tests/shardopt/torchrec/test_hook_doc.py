"""docs/hook.md, run as the one script that it is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "hook.md"


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile("\n".join(blocks), str(PAGE), "exec"), names)
    assert set(names["plan"].plan["ebc"]) == {"t"}
    assert (tmp_path / "model.yaml").exists()
    assert names["workload"].batch_size == 4096
