"""What ranks of the laboratory ask of the scheduler."""

from __future__ import annotations

import os
import threading

import pytest

from lab import quiet_ranks
from lab.quiet_ranks import MOST_FAVOURED, hasten_main


@pytest.mark.parametrize("refuse", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_only_rank_is_real_time_and_others_stay_below_gloo(
    monkeypatch: pytest.MonkeyPatch, ranks: int, refuse: bool
) -> None:
    asked: list[int] = []

    def set_priority(which: int, who: int, value: int) -> None:
        asked.append(value)
        if refuse:
            raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", set_priority)
    monkeypatch.setattr(quiet_ranks, "hasten_thread", lambda thread: asked.append(thread))
    hasten_main(ranks)
    assert asked == [threading.get_native_id() if ranks == 1 else MOST_FAVOURED]
