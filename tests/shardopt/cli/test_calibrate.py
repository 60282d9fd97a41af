"""What `calibrate` refuses before anything is measured, and one group measured alone."""

import json
from pathlib import Path

import pytest

from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.model.workload import DenseArch, Feature, Table, Workload
from shardopt.calibrate import Group, run
from shardopt.cli.app import main


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "-o", str(tmp_path / "no" / "p.yaml")]) == 2
    assert "there is no directory" in capsys.readouterr().err


def test_rows_and_profile_in_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "p.yaml")
    assert main(["calibrate", "-o", path, "--rows", path]) == 2
    assert "choose another" in capsys.readouterr().err


def test_ranks_that_make_no_sense() -> None:
    with pytest.raises(InputError, match="number of ranks is 1; it must be at least 2"):
        run.check_calibration("gloo", 1)


def test_a_model_larger_than_memory() -> None:
    huge = Table("huge", 10**12, 128, (Feature("f", 1.0),))
    model = Workload("huge", 8, (huge,), DenseArch(1, (1,), (1,)))
    with pytest.raises(InputError, match=r"table 'huge' of the model has .* choose a model"):
        run.check_calibration("gloo", 2, model=model)


def test_more_gpus_than_there_are() -> None:
    torch = pytest.importorskip("torch")
    ranks = torch.cuda.device_count() + 2
    with pytest.raises(InputError, match="or gloo to measure CPU ranks"):
        run.check_calibration("nccl", ranks)


def test_broken_rows_end_with_their_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fbgemm_gpu")
    rows = tmp_path / "p.rows.csv"
    rows.write_text("a,b\n1,2\n")
    assert main(["calibrate", "-o", str(tmp_path / "p.yaml")]) == 2
    assert "p.rows.csv:1: no column 'schema'" in capsys.readouterr().err


def test_the_origin_does_not_name_the_host() -> None:
    import platform

    assert platform.node() not in str(run.origin("gloo")) or not platform.node()


def test_a_link_is_for_ranks_that_we_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fbgemm_gpu")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main(["calibrate", "--link", "1", "-o", str(tmp_path / "p.yaml")]) == 2
    assert "leave it out under torchrun" in capsys.readouterr().err
    assert main(["calibrate", "--ranks", "3", "-o", str(tmp_path / "p.yaml")]) == 2
    assert "torchrun has started 2" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.distributed
def test_the_host_alone_is_measured_and_written_over_the_base(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("fbgemm_gpu")
    path = tmp_path / "p.yaml"
    assert main(["calibrate", "--only", "host", "-o", str(path), "--quiet", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["errors"]) == {"host"}
    mine, base = load_hardware(str(path)), load_hardware("cpu-gloo")
    assert mine.overheads.provenance.kind == "measured"
    assert mine.overheads.iteration_us > 0
    assert mine.embedding == base.embedding


def test_one_rank_is_enough_for_the_host_of_a_gpu_alone() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(InputError, match="it must be at least 2"):
        run.check_calibration("nccl", 1)
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="as many GPUs"):
            run.check_calibration("nccl", 1, only=Group.HOST)
    with pytest.raises(InputError, match="it must be at least 2"):
        run.check_calibration("gloo", 1, only=Group.HOST)
