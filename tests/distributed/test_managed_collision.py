"""A managed-collision module trains under the plan that shardopt finds for it."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torchrec")

from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed


@pytest.mark.slow
def test_ids_are_remapped_and_rows_trained(tmp_path: Path) -> None:
    run_ranks("managed_collision_worker", tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"found.{rank}.json").read_text())
        assert found["types"] == {"a": "row_wise", "b": "row_wise"}  # nothing else remaps
        losses = found["losses"]
        assert losses[0] > losses[-1] > 0  # squares of what was looked up, stepped towards 0
