"""A DLRM under TorchRec on two ranks, scaled out of one trace, is that of a larger batch."""

from pathlib import Path

import pytest

pytest.importorskip("torchrec")

from predictor.trace.read import load_traces
from shardopt.replay.generate import program_of
from shardopt.replay.program.build import Annotations
from shardopt.replay.program.program import RankProgram
from shardopt.replay.scale.one import scale_alone
from tests.distributed.ranks import run_ranks
from tests.shardopt.replay.differences import check_equal

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def captured(job: Path, batch: int) -> list[RankProgram]:
    job.mkdir()
    run_ranks("scale_worker", job, batch)
    found = load_traces([job / "traces"])
    return [program_of(trace, found, Annotations()) for trace in found.executions]


@pytest.mark.parametrize("batch", [48, 16])
def test_dlrm_of_ranks(batch: int, tmp_path: Path) -> None:
    """Of 16 samples, each is as many as a table is wide."""
    ones, wholes = captured(tmp_path / "one", batch), captured(tmp_path / "two", 2 * batch)
    for one, whole in zip(ones, wholes, strict=True):
        check_equal(scale_alone(one, 2), whole)
