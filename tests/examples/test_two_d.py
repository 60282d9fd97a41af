"""The script of 2D sparse parallelism, as its user tries it on CPUs."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrec")
pytestmark = pytest.mark.distributed

REPOSITORY = Path(__file__).parents[2]
SECONDS = 200


@pytest.mark.slow
def test_it_trains_in_two_groups() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "4", str(REPOSITORY / "examples" / "two_d.py")),
            *("--group-size", "2", "--backend", "gloo", "--steps", "6", "--sync-interval", "3"),
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "PYTHONOPTIMIZE": "1",
        },
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 6
    assert losses[-1] < 0.5 * losses[0]
