"""The notebook runs as it stands, and its answers are those of the commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torchrec")

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "quickstart.ipynb"


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """Run the cells with little effort; return their names, and last values as ``shown``."""
    found: dict[str, Any] = {"shown": []}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(NOTEBOOK.parent)
        patch.setenv("XDG_CACHE_HOME", "/nonexistent")
        for cell in json.loads(NOTEBOOK.read_text())["cells"]:
            if cell["cell_type"] == "code":
                source = "".join(cell["source"]).replace("effort=0.1", "effort=0.002")
                *lines, last = source.split("\n")
                exec("\n".join(lines), found)
                found["shown"].append(eval(last, found))
    return found


def test_the_first_plan_is_the_best_and_is_that_of_the_file(
    names: dict[str, Any], tmp_path: Path
) -> None:
    found, (_, breakdown, explained, elsewhere, plan) = names["found"], names["shown"]
    assert sum(breakdown.values()) == pytest.approx(found.iteration_ms)
    assert explained.iteration_ms == pytest.approx(found.iteration_ms)
    assert elsewhere.iteration_ms != found.iteration_ms
    assert found.iteration_ms == min(row["iteration_ms"] for row in found.rows)
    assert set(plan.plan["model.sparse_arch.embedding_bag_collection"]) == {"t_user", "t_item"}
    found.save(tmp_path / "plan.json")
    again = names["shardopt"].predict("configs/models/example.yaml", tmp_path / "plan.json")
    assert again.iteration_ms == pytest.approx(found.iteration_ms)


def test_answers_are_frames_pages_and_objects(names: dict[str, Any]) -> None:
    for shown in (names["found"], names["shown"][2], names["shown"][3]):
        json.dumps(shown.to_dict())
        assert shown.to_html().startswith("<!DOCTYPE html>")
        assert shown._repr_html_().count("<tr>") == 1 + len(shown.rows)
        assert shown._repr_html_().startswith("<table")
        pytest.importorskip("pandas")
        assert shown.to_frame().to_dict("records")[0]["iteration_ms"] == shown.iteration_ms


def test_every_code_cell_shows_its_answer_without_a_path_of_a_machine() -> None:
    cells = [c for c in json.loads(NOTEBOOK.read_text())["cells"] if c["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in cells)
    shown = json.dumps([cell["outputs"] for cell in cells])
    assert str(Path.home()) not in shown
    assert str(NOTEBOOK.parents[1]) not in shown
