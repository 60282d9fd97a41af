"""The same seed gives the same file, however many cores and threads a machine has to offer."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

import shardopt
from predictor.model.distribution import Zipf
from predictor.model.workload import DenseArch, Feature, Workload
from shardopt.config.write import write_model
from tests.builders import a_table, a_workload

ROOT = Path(shardopt.__file__).resolve().parent.parent

PLAN_ON_CORES = """
import os, sys
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {int(core) for core in sys.argv[1].split(",")})
from shardopt.cli.app import main
sys.exit(main(sys.argv[2:]))
"""


def a_model() -> Workload:
    rng = random.Random(0)
    tables = [
        a_table(
            f"t{i}",
            int(10 ** rng.uniform(4, 7)),
            features=(Feature(f"f{i}", rng.choice([1.0, 5.0, 20.0]), distribution=Zipf(1.05)),),
        )
        for i in range(12)
    ]
    dense = DenseArch(13, (64,), (64, 1), "dot")
    return a_workload(*tables, batch_size=4096, dense=dense)


def cores() -> list[str]:
    """One core and two, where the machine has two."""
    if not hasattr(os, "sched_getaffinity"):
        return ["0", "0"]
    usable = sorted(os.sched_getaffinity(0))
    return [str(usable[0]), ",".join(map(str, usable[:2]))]


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--hbm-gib", "3.3")], ids=["roomy", "tight"])
def test_cores_threads_and_hashes_change_no_byte(tmp_path: Path, more: tuple[str, ...]) -> None:
    write_model(tmp_path / "model.yaml", a_model())
    running = []
    for number, (core, threads, seed) in enumerate(zip(cores(), "12", "07", strict=True)):
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONHASHSEED": seed,
            "OMP_NUM_THREADS": threads,
            "OPENBLAS_NUM_THREADS": threads,
        }
        words = ["plan", "model.yaml", "--gpus", "4", "--effort", "0.2", "--seed", "5", "--quiet"]
        words.append("--no-cache")
        command = [sys.executable, "-c", PLAN_ON_CORES, core, *words, *more, "-o", f"{number}.json"]
        running.append(
            subprocess.Popen(command, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        )
    for process in running:
        errors = process.communicate(timeout=200)[1]
        assert process.returncode == 0, errors
    first, second = ((tmp_path / f"{number}.json").read_bytes() for number in (0, 1))
    assert first == second
    assert b"iteration_ms" in first
