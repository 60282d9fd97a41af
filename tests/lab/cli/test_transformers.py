"""What `python -m lab transformers` hands on, and what it refuses; nothing is measured here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab.transformers import run as transformers


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    monkeypatch.setattr(transformers, "run_transformers", lambda *words: found.append(words[:3]))
    return found


def test_what_is_asked_is_handed_on(run: Callable, asked: list[tuple[Any, ...]]) -> None:
    assert run("transformers", "-o", "there", "--rounds", 3, "--ranks", "2").code == 0
    assert run("transformers", "--output", "there").code == 0
    assert asked == [(Path("there"), 3, (2,)), (Path("there"), 8, (1, 2))]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--ranks", "4"), "--ranks is '4'; give 1, 2 or 1,2"),
        (("--ranks", ""), "--ranks is ''"),
        (("--rounds", "0"), "rounds is 0"),
    ],
)
def test_what_cannot_be_is_refused(
    run: Callable, asked: list[tuple[Any, ...]], words: tuple[str, ...], said: str
) -> None:
    done = run("transformers", "-o", "there", *words)
    assert done.code == 2
    assert said in " ".join(done.err.split())
    assert not asked
