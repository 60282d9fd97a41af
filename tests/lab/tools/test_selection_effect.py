"""The experiment on selection: wrong costs are wrong everywhere, and the table is whole."""

from __future__ import annotations

import sys

import pytest

from lab.tools import selection_effect
from lab.tools.selection_effect import draw_model


def test_models_are_drawn_by_seed() -> None:
    assert draw_model(3, 5, 512) == draw_model(3, 5, 512) != draw_model(4, 5, 512)
    assert len(draw_model(0, 7, 512).tables) == 7


@pytest.mark.slow
def test_the_table_has_a_line_for_both_experiments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "--tables 4 --models 1 --worlds 1 --effort 0.01"
    monkeypatch.setattr(sys, "argv", ["tool", *words.split()])
    selection_effect.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines[2:]] == ["around", "behind"]
    assert all(line.count("|") == 9 for line in lines)
