"""Refusals of `calibrate` before anything is measured, and one group measured alone."""

import json
import platform
from pathlib import Path

import pytest

from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.model.workload import DenseArch, Feature, Table, Workload
from shardopt.calibrate import Group, run
from shardopt.calibrate.points import TINY, CalibrationSettings
from shardopt.cli.app import main


def check(backend: str, ranks: int, **fields: object) -> None:
    settings = CalibrationSettings(backend, ranks, TINY, Path("rows.csv"), **fields)
    run.check_calibration(settings)


def test_ranks_that_make_no_sense() -> None:
    torch = pytest.importorskip("torch")
    gpus = torch.cuda.device_count()
    for backend, ranks, only, message in (
        ("gloo", 1, None, "at least 2"),
        ("gloo", 1, Group.HOST, "at least 2"),
        ("nccl", 1, Group.COLLECTIVES, "at least 2"),
        ("nccl", gpus + 2, None, "gloo"),
    ):
        with pytest.raises(InputError, match=message):
            check(backend, ranks, only=only)
    for only in {None, *Group} - {Group.COLLECTIVES} if not gpus else ():
        # one rank is enough for all of a GPU but its collectives
        with pytest.raises(InputError, match="as many GPUs"):
            check("nccl", 1, only=only)


@pytest.mark.parametrize(
    ("backend", "gpus", "only", "ranks"),
    [
        ("nccl", 1, None, 1),
        ("nccl", 1, Group.GEMM, 1),
        ("nccl", 1, Group.COLLECTIVES, 2),
        ("nccl", 8, None, 2),
        ("gloo", 1, None, 2),
    ],
)
def test_one_gpu_is_one_rank(
    monkeypatch: pytest.MonkeyPatch, backend: str, gpus: int, only: Group | None, ranks: int
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert run.ranks_of_machine(backend, only) == ranks


def test_a_model_larger_than_memory() -> None:
    huge = Table("huge", 10**12, 128, (Feature("f", 1.0),))
    model = Workload("huge", 8, (huge,), DenseArch(1, (1,), (1,)))
    with pytest.raises(InputError, match="table 'huge'"):
        check("gloo", 2, model=model)


def test_broken_rows_end_with_their_line(refused, tmp_path: Path) -> None:
    pytest.importorskip("fbgemm_gpu")
    (tmp_path / "p.rows.csv").write_text("a,b\n1,2\n")
    refused("calibrate", "-o", "p.yaml", says="p.rows.csv:1: no column 'schema'")


def test_the_origin_does_not_name_the_host() -> None:
    assert platform.node() not in str(run.origin("gloo")) or not platform.node()


def test_what_torchrun_has_decided(refused, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fbgemm_gpu")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    refused("calibrate", "--link", "1", "-o", "p.yaml", says="--link")
    refused("calibrate", "--ranks", "3", "-o", "p.yaml", says="2; leave --ranks out")


@pytest.mark.slow
@pytest.mark.distributed
def test_the_host_alone_is_measured_and_written_over_the_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fbgemm_gpu")
    path = tmp_path / "p.yaml"
    assert main(["calibrate", "--only", "host", "-o", str(path), "--quiet", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert set(document["errors"]) == {"host"}
    calibrated, base = load_hardware(str(path)), load_hardware("cpu-gloo")
    assert calibrated.overheads.provenance.kind == "measured"
    assert calibrated.overheads.iteration_us > 0
    assert calibrated.embedding == base.embedding
