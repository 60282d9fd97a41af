"""Machines on which a command still does what it can: no home, a full disk, others beside it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shardopt.cli.app import main
from shardopt.files import TEMPORARY
from tests.quick import quick_first, quick_only
from tests.shardopt.bench import test_learn as job

PLAN = ("--gpus", 2, "--effort", 0.005)


@pytest.mark.parametrize("home", quick_first(1, ["/proc", "/nowhere"]))
def test_a_home_that_nobody_can_write_is_no_home(
    run, model: Path, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", home)
    done = run("plan", model, *PLAN, "-o", "p.json", "--quiet")
    assert (done.code, done.err) == (0, "")
    assert json.loads(Path("p.json").read_text())["world_size"] == 2


WRITES = {
    "plan": ("plan", "model.yaml", *PLAN, "--quiet", "-o", "out"),
    "explain": ("explain", "model.yaml", "given.json", "--html", "out"),
    "trace": ("explain", "model.yaml", "given.json", "--trace", "out"),
    "stats": ("stats", "ids.npy", "-o", "out"),
}


@pytest.mark.usefixtures("model", "plan")
@pytest.mark.parametrize("command", quick_only(["plan", "stats"], WRITES))
def test_a_full_disk_leaves_the_old_file(
    refused, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are refused when they are put on the disk, as a full one does at the latest."""

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    np.save(tmp_path / "ids.npy", np.arange(60).reshape(20, 3) % 7)
    (tmp_path / "out").write_text("old")
    before = sorted(os.listdir(tmp_path))
    monkeypatch.setattr(os, "fsync", full)
    refused(*WRITES[command], says="out: cannot write: No space left")
    assert (tmp_path / "out").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == before


def start(*words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "shardopt", *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_two_commands_with_one_cache_and_one_output(model: Path, tmp_path: Path) -> None:
    """Both end well, and what lies there is whole and of one of them."""
    out = tmp_path / "p.json"
    words = ("plan", model, *PLAN, "-o", out, "--json")
    for _ in range(3):  # the last ones find the answer of the first
        both = [start(*words), start(*words)]
        shown = [process.communicate(timeout=120) for process in both]
        assert [process.returncode for process in both] == [0, 0], shown
        times = {json.loads(stdout)["iteration_ms"] for stdout, _ in shown}
        assert {json.loads(out.read_text())["iteration_ms"]} == times
    assert not list(tmp_path.glob(".*"))
    assert main(["predict", str(model), str(out), "--quiet"]) == 0


KILLED = """
import os, signal, sys
from pathlib import Path
from shardopt.calibrate import points, run

def say(text):
    if rows.exists() and len(rows.read_text().splitlines()) > 6:
        os.kill(os.getpid(), signal.SIGKILL)

rows = Path(sys.argv[1])
run.measure(points.CalibrationSettings("gloo", 2, points.TINY, rows), say)
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_a_calibration_that_is_killed_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("fbgemm_gpu")
    pytest.importorskip("scipy")
    from shardopt.calibrate import points, run

    rows = tmp_path / "rows.csv"
    killed = subprocess.run([sys.executable, "-c", KILLED, str(rows)], check=False, timeout=300)
    assert killed.returncode == -signal.SIGKILL
    lines = rows.read_text().splitlines()

    file = run.measure(points.CalibrationSettings("gloo", 2, points.TINY, rows), lambda text: None)
    assert rows.read_text().splitlines()[: len(lines)] == lines
    assert len(file.rows) > len(lines)


KILLED_BEFORE = """
import os, signal, sys
from shardopt.cli.app import main

call = sys.argv[1]
setattr(os, call, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
main(sys.argv[2:])
"""


@pytest.mark.slow
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_what_was_learned_outlives_a_killed_learn(call: str, tmp_path: Path) -> None:
    """It is killed as it writes: what an earlier one learned stays, and the next one goes on."""
    (tmp_path / "model.yaml").write_text(job.MODEL)
    job.write(tmp_path, job.plan(), [job.trace(0), job.trace(1)])
    assert job.learn(tmp_path, "--quiet") == 0
    output, further = tmp_path / "learned.yaml", tmp_path / "next.yaml"
    first = output.read_text()

    words = ["learn", tmp_path / "traces", "--model", tmp_path / "model.yaml"]
    words += ["--plan", tmp_path / "plan.json"]
    for more in (["-o", output], ["-o", further, "--hardware", output]):
        command = [sys.executable, "-c", KILLED_BEFORE, call, *map(str, [*words, *more])]
        killed = subprocess.run(command, check=False, timeout=300)
        assert killed.returncode == -signal.SIGKILL
    assert output.read_text() == first
    assert not further.exists()

    assert job.learn(tmp_path, "--quiet") == 0
    assert output.read_text() == first
    assert not list(tmp_path.glob(f".learned*{TEMPORARY}"))
