"""Re-planning in a training loop, and a cluster file, as their user runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrec")
pytestmark = [pytest.mark.slow, pytest.mark.distributed]

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
TOPOLOGY = """\
\tGPU0\tGPU1\tGPU2\tGPU3\tCPU Affinity
GPU0\t X \tNV18\tNV18\tNV18\t0-31
GPU1\tNV18\t X \tNV18\tNV18\t0-31
GPU2\tNV18\tNV18\t X \tNV18\t0-31
GPU3\tNV18\tNV18\tNV18\t X \t0-31
"""


def run(*words: object) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        env={
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_training_loop_moves_its_tables(tmp_path: Path) -> None:
    script = EXAMPLES / "replan_while_training.py"
    words = ("--standalone", "--nproc-per-node", 2, script, tmp_path)
    out = run("-m", "torch.distributed.run", *words)
    lines = [line for line in out.splitlines() if line.startswith("step ")]
    assert len(lines) == 4
    assert (tmp_path / "window-80.npz").is_file()


def test_plans_are_confirmed_before_training() -> None:
    script = EXAMPLES / "confirm_while_training.py"
    assert len(script.read_text().splitlines()) < 80
    out = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, script, 0.1)
    assert "trains under" in out
    assert "trained 20 steps" in out


def test_a_cluster_file(tmp_path: Path) -> None:
    (tmp_path / "topo.txt").write_text(TOPOLOGY)
    model = REPOSITORY / "configs" / "models" / "dlrm_criteo_kaggle.yaml"
    hosts = tmp_path / "hosts.txt"
    hosts.write_text("node[01-02]\n")
    run(EXAMPLES / "plan_a_cluster.py", model, tmp_path / "topo.txt", hosts, tmp_path)
    assert (tmp_path / "cluster.yaml").is_file()
    assert json.loads((tmp_path / "plan.json").read_text())["world_size"] == 8
