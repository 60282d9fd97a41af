"""The answer at the head of the README."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.pages import sample
from lab.pages.sample import main_lines, with_sample
from predictor.errors import InputError
from tests.public_data import ROOT

ANSWER = """Use plan 1: it gains 2 %.
Advice 1 gains more.

model  2 tables

Advice  what to change
  #  change   ms
  ──────────────
  1  first  6.44   one, and
                   another
  2  second 7.00
To do 1: something.

Plans  predicted
  #  ms     found by
  ──────────────────
  1  22.29  chosen among ties
  2  22.30  rounding
     22.91  TorchRec's planner

Proved: no plan is faster.
Note: a caveat.
"""
README = """```console
$ make demo
```
text
```console
$ shardopt plan model.yaml --gpus 8 -o plan.json
old
```
more
"""


def test_the_three_answers_are_kept_and_no_caveat() -> None:
    assert [*main_lines(ANSWER.splitlines())] == [
        "Use plan 1: it gains 2 %.",
        "Advice 1 gains more.",
        "Advice  what to change",
        "  #  change   ms",
        "  1  first  6.44   one, and",
        "                   another",
        "...",
        "Plans  predicted",
        "  #  ms     found by",
        "  1  22.29  chosen among ties",
        "     22.91  TorchRec's planner",
        "Proved: no plan is faster.",
    ]


def test_an_answer_without_advice() -> None:
    head, _, plans = ANSWER.partition("Advice  ")
    text = head + plans[plans.index("Plans") :]
    assert "..." not in [*main_lines(text.splitlines())]


def test_only_the_answer_of_the_plan_command_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []
    monkeypatch.setattr(sample, "run", lambda words, _: commands.append(words) or ANSWER)
    text = with_sample(README, Path())
    assert commands == ["plan model.yaml --gpus 8 -o plan.json"]
    assert text.startswith(README.partition("old")[0])
    assert text.endswith("Proved: no plan is faster.\n```\nmore\n")
    assert with_sample(text, Path()) == text


def test_a_page_without_the_command_is_refused() -> None:
    with pytest.raises(InputError, match=r"README\.md"):
        with_sample("no block", Path())


def test_a_command_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no-such-model"):
        sample.run("plan no-such-model.yaml --gpus 2", ROOT)
