"""A calibration of a few seconds: real kernels, real ranks, rows that resume."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from predictor.cost.collectives import OPS
from predictor.hardware.loader import load_hardware
from predictor.model.workload import DenseArch, Feature, Table, Workload
from shardopt.calibrate import families, run
from shardopt.calibrate import points as design
from shardopt.calibrate.collectives import FEWEST_SIZES
from shardopt.calibrate.profile import build_profile, profile_text
from shardopt.calibrate.rows import PARTS, CalibrationRows, Measurement, accept
from shardopt.ranks.rank import RankDiedError

pytest.importorskip("fbgemm_gpu")
pytest.importorskip("scipy")
pytestmark = pytest.mark.distributed


def settings(folder: Path, **others: object) -> design.CalibrationSettings:
    return design.CalibrationSettings("gloo", 2, design.TINY, folder / "rows.csv", **others)


@pytest.mark.slow
def test_a_tiny_calibration_measures_resumes_and_loads(tmp_path: Path) -> None:
    asked = settings(tmp_path)
    said: list[str] = []
    whole = run.measure(asked, said.append).rows
    measured = {row.point.family for row in whole}
    asked_for = families.alone(design.TINY) + families.together(design.TINY, 2)
    assert measured == {point.family for point in asked_for}
    known = [row for row in whole if row.point.family == "reference"]
    assert {(r.point.params["at"], r.point.params["kernel"]) for r in known} == {
        (at, kernel) for at in ("start", "middle", "end") for kernel in design.REFERENCE_KERNELS
    }
    assert all(row.settings and row.date and row.median_us > 0 for row in whole)
    before = asked.rows.read_text()

    assert run.measure(asked, said.append).rows == whole
    assert asked.rows.read_text() == before, "everything was there already"

    # as after an interruption: the last rows are missing, one is cut off
    asked.rows.write_text("".join(before.splitlines(keepends=True)[:-3]) + "shardopt.calib")
    again = run.measure(asked, said.append).rows
    assert {row.key for row in again} == {row.key for row in whole}

    found = build_profile(again, run.origin("gloo"), load_hardware("cpu-gloo"), "tiny", 2, 8.0)
    path = tmp_path / "tiny.yaml"
    path.write_text(profile_text(found))
    assert load_hardware(str(path)).groups["embedding"].provenance.kind == "measured"


@pytest.mark.slow
def test_every_table_of_a_model_is_looked_up_as_the_model_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feature = Feature("f", 3.0)
    tables = (
        Table("plain", 1000, 8, (feature, Feature("g", 1.5))),
        Table("narrow", 1000, 8, (feature,), data_type="fp16", pooling="mean", optimizer="sgd"),
        Table("weighted", 50, 4, (feature,), module="weighted", weighted=True),
        Table("unpooled", 1000, 8, (feature,), module="sequence", pooling="none"),
    )
    model = Workload("mixed", 16, tables, DenseArch(1, (1,), (1,)), sha256="abc")
    points = [p for p in families.alone(design.TINY, model, 2) if p.family == "model_lookup"]
    monkeypatch.setattr(run, "points_of", lambda _: (points, []))
    seen: list[Measurement] = run.measure(settings(tmp_path, model=model), print).rows
    assert [(row.point.params["table"], row.part) for row in seen] == [
        (key, part) for key in model.keys for part in PARTS["model_lookup"]
    ]
    assert seen[0].point.params == {
        **{"model_sha": "abc", "batch_size": 16, "ranks": 2},
        "table": "plain",
    }
    rows, dim, bags, ids, distinct = seen[0].facts["tables"][0]
    assert (rows, dim, bags) == (1000, 8, 64), "two features of 32 samples"
    assert 96 + 32 < distinct <= ids == pytest.approx(32 * 4.5, rel=0.1)


@pytest.mark.slow
def test_a_rank_that_dies_keeps_what_was_measured(tmp_path: Path, pids: list[int]) -> None:
    asked = settings(tmp_path)

    def say(text: str) -> None:
        if text.startswith("[2/"):
            os.kill(pids[0], signal.SIGKILL)

    with pytest.raises(RankDiedError, match=r"rank 0 died of signal SIGKILL") as caught:
        run.measure(asked, say)
    assert f"{asked.rows} keeps what was measured" in str(caught.value)
    assert len(run.open_rows(asked, say).rows) >= 2


CALIBRATE = """
from dataclasses import replace
from shardopt.calibrate import points as design
from shardopt.cli.app import main
tiny = replace(design.TINY, gemms=24, elementwise_octaves=(14, 18), collective_octaves=(10, 18))
design.QUICK = design.FULL = tiny
raise SystemExit(main(["calibrate", "--quick", "-o", "made.yaml", *{flags!r}]))
"""


def torchrun(folder: Path, nodes: int, *flags: str) -> list[subprocess.CompletedProcess[str]]:
    """Two ranks of gloo, on one host or each on one that it takes for its own."""
    script = folder / "calibrate.py"
    script.write_text(CALIBRATE.format(flags=list(flags)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for node in range(nodes):
        where = ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        where += ["--nnodes", str(nodes), "--node-rank", str(node)]
        ranks = ["--nproc-per-node", str(2 // nodes)]
        command = [sys.executable, "-m", "torch.distributed.run", *where, *ranks, str(script)]
        started.append(
            subprocess.Popen(
                command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    done = []
    for process in started:
        out, err = process.communicate(timeout=300)
        done.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    return done


def has_curves(path: Path) -> bool:
    """Return True if every collective keeps enough rows; other work may disturb a row twice."""
    rows = accept(CalibrationRows(path, run.origin("gloo")).rows).rows
    fitted = [r.point for r in rows if r.point.family == "collective" and not r.point.test]
    sizes = Counter(point.params["op"] for point in fitted)
    return min(sizes[op] for op in OPS) >= FEWEST_SIZES


@pytest.mark.slow
def test_ranks_of_torchrun_are_joined_and_the_first_writes(tmp_path: Path) -> None:
    (done,) = torchrun(tmp_path, 1, "--json")
    assert done.returncode == 0, done.stderr
    # one object: the other rank is silent
    said = json.loads(done.stdout)
    assert "gemm fp32" in said["errors"]
    profile = load_hardware(str(tmp_path / "made.yaml"))
    base = load_hardware("cpu-gloo")
    measured = has_curves(tmp_path / "made.rows.csv")
    assert measured or "all_to_all" not in said["errors"]
    assert (profile.collectives.intra != base.collectives.intra) == measured
    assert profile.gpus_per_host == 2
    assert profile.collectives.inter == base.collectives.inter
    rows = (tmp_path / "made.rows.csv").read_text()

    (again,) = torchrun(tmp_path, 1)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "made.rows.csv").read_text() == rows, "everything was there already"
    assert again.stdout.count("made.rows.csv") == 1


@pytest.mark.slow
def test_ranks_of_several_hosts_tell_the_link_between_them(tmp_path: Path) -> None:
    first, second = torchrun(tmp_path, 2)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert second.stdout == ""
    profile = load_hardware(str(tmp_path / "made.yaml"))
    base = load_hardware("cpu-gloo")
    inter = profile.collectives.inter
    measured = has_curves(tmp_path / "made.rows.csv")
    assert (inter != base.collectives.inter) == measured
    assert not measured or inter.provenance.range["ranks"] == (2, 2)
    assert profile.gpus_per_host == 1
    assert profile.collectives.intra == base.collectives.intra
