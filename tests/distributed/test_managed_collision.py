"""A managed-collision module trains under the plan that shardopt finds for it."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrec")
sys.path.insert(0, str(Path(__file__).parent))
from test_training import launch

pytestmark = pytest.mark.distributed
WORKER = Path(__file__).parent / "managed_collision_worker.py"


def test_ids_are_remapped_and_rows_trained(tmp_path: Path) -> None:
    launch(WORKER, tmp_path, 2, 2)
    for rank in range(2):
        found = json.loads((tmp_path / f"found.{rank}.json").read_text())
        assert found["types"] == {"a": "row_wise", "b": "row_wise"}  # nothing else remaps
        losses = found["losses"]
        assert losses[0] > losses[-1] > 0  # squares of what was looked up, stepped towards 0
