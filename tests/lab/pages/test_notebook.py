"""Cells run as in Jupyter: what they print, and the value of the last expression."""

from __future__ import annotations

from typing import Any

from lab.pages.notebook import run_cell


class Shown:
    def __repr__(self) -> str:
        return "plain"

    def _repr_html_(self) -> str:
        return "<b>rich</b>"


def test_a_cell_gives_what_it_prints_and_its_last_value() -> None:
    names: dict[str, Any] = {"Shown": Shown}
    assert run_cell("a = 1\nprint(a)", names, 1) == [
        {"name": "stdout", "output_type": "stream", "text": ["1\n"]}
    ]
    (output,) = run_cell("b = a + 1\nShown()", names, 2)
    assert names["b"] == 2
    assert output["data"] == {"text/plain": ["plain"], "text/html": ["<b>rich</b>"]}
    assert run_cell("None", names, 3) == []
