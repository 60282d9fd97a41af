"""Windows of one model: the same tables, features that move, the same on any machine."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from lab.tasks.models import WINDOWS, draw_windows
from shardopt.config import load_model
from shardopt.config.write import write_model

SEEDS = range(12)


@pytest.mark.parametrize("seed", [0, 3])
def test_windows_differ_in_their_features_alone(seed: int, tmp_path: Path) -> None:
    first, *later = draw_windows(seed)
    assert WINDOWS[0] <= 1 + len(later) <= WINDOWS[1]
    bare = [replace(table, features=()) for table in first.tables]
    for window in later:
        assert [replace(table, features=()) for table in window.tables] == bare
        assert (window.batch_size, window.dense, window.train_pipeline) == (
            first.batch_size,
            first.dense,
            "base",
        )
        assert window.tables != first.tables
        write_model(tmp_path / "m.yaml", window)
        assert load_model(tmp_path / "m.yaml") == window


def test_heads_move_and_never_come_back() -> None:
    orders = [
        [window.tables[at].features[0].id_order for window in windows]
        for windows in map(draw_windows, SEEDS)
        for at in range(len(windows[0].tables))
    ]
    assert any("frequency" in order and order[-1] == "random" for order in orders)
    assert not any(("random", "frequency") in pairwise(order) for order in orders)
