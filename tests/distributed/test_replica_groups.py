"""Four ranks in two sharding groups train under `DMPCollection` as the prediction says."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torchrec")

from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed

WORLD, GROUPS = 4, 2


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("by_hand",)], ids=["planned", "row_wise"])
def test_copies_are_averaged_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")  # DMPCollection asserts that there is a GPU
    run_ranks("replica_groups_worker", tmp_path, *words, world_size=WORLD)
    ranks = [json.loads((tmp_path / f"found.{r}.json").read_text()) for r in range(WORLD)]
    foretold = ranks[0]
    assert foretold["mesh"] == [[0, 2], [1, 3]]
    for rank, found in enumerate(ranks):
        assert all(0 < loss < 1 for loss in found["losses"])
        assert found["is_mean"]
        place = rank // GROUPS
        # every second step of four
        first = found["calls"][: len(found["calls"]) // 2]
        assert found["calls"] == first * 2
        # weights a data type at a time, then the states of all
        *weights, states = first
        assert states[1] == foretold["state_bytes"][place]
        assert sum(size for _, size in weights) == foretold["weight_bytes"][place]
        assert found["dense"] == pytest.approx(foretold["dense"]), "reduced over all ranks"


@pytest.mark.slow
def test_parts_of_copies_move_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    run_ranks("scattered_copies_worker", tmp_path, world_size=WORLD)
    for rank in range(WORLD):
        found = json.loads((tmp_path / f"found.{rank}.json").read_text())
        place = rank // GROUPS
        for step in found["steps"]:
            assert 0 < step["loss"] < 1
            assert step["scattered"] == step["gathered"] == found["weight_bytes"][place]
            assert step["parts"] == found["parts"][place]
