"""The ranker with transformers, from its module to a plan, as its user runs it."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrec")

REPOSITORY = Path(__file__).parents[2]
SECONDS = 60


@pytest.mark.slow
def test_from_module_to_plan_in_under_a_minute(tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [
            sys.executable,
            str(REPOSITORY / "examples" / "plan_any_model.py"),
            *("--folder", str(tmp_path), "--gpus", "8", "--effort", "0.02"),
        ],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=5 * SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # of one core: what else the machine does is not its matter
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent < SECONDS
    assert "Predicted" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"ranker.yaml", "ranker.ops.json"}
    text = (tmp_path / "ranker.ops.json").read_text()
    assert str(REPOSITORY) not in text
    for op in ("_scaled_dot_product", "jagged_to_padded_dense", "native_layer_norm"):
        assert op in text
