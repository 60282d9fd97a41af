"""What `bench run` decides without any rank: whom it blames, who it is, what it calls plans."""

import json
import os
from pathlib import Path

import pytest

from predictor.errors import PlanError
from shardopt.bench.job import available_bytes
from shardopt.bench.run import environment, joined
from shardopt.bench.worker import described
from shardopt.cli.bench.run import plan_names
from shardopt.measure.load import Usage, other_cores, usage
from shardopt.ranks.launch import _blame


def leave(folder: Path, rank: int, error: Exception, at: float) -> None:
    """What a rank writes before it ends."""
    try:
        raise error
    except Exception as caught:
        (folder / f"error.{rank}").write_text(json.dumps({**described(caught), "at": at}))


def test_the_first_error_is_the_cause(tmp_path: Path) -> None:
    leave(tmp_path, 0, RuntimeError("Connection closed by peer"), at=2.0)
    leave(tmp_path, 1, ValueError("no such row\nmore"), at=1.0)
    message = str(_blame(tmp_path, [1, 1]))
    assert message.startswith("rank 1 died of ValueError at bench/test_run.py:")
    assert message.endswith(": no such row")


def test_a_rank_that_was_killed_comes_before_those_that_lost_it(tmp_path: Path) -> None:
    leave(tmp_path, 0, RuntimeError("Connection closed by peer"), at=2.0)
    (tmp_path / "log.1").write_text("terminate called\n\nwithout an active exception\n")
    message = str(_blame(tmp_path, [1, -9]))
    assert "rank 1 died of signal SIGKILL (the system may have run out of memory)" in message
    assert "terminate called / without an active exception" in message


def test_an_error_of_ours_is_told_as_it_is(tmp_path: Path) -> None:
    leave(tmp_path, 1, PlanError("plan: table 'a': no"), at=1.0)
    error = _blame(tmp_path, [0, 1])
    assert str(error) == "plan: table 'a': no"
    assert error.exit_code == 2


def test_torchrun_is_known_by_its_variables() -> None:
    assert joined({}) is None
    assert joined({"RANK": "0"}) is None
    found = joined({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
    assert found is not None
    assert (found.world_size, found.place.rank, found.place.local) == (4, 3, 1)


def test_plans_are_called_by_their_file_names() -> None:
    paths = [Path("x/a.json"), Path("y/a.json"), Path("b.json"), Path("a.json")]
    assert plan_names(paths) == ["a", "a#2", "b", "a#3"]


def test_the_environment_names_no_host_and_no_path() -> None:
    text = json.dumps(environment("gloo"))
    assert os.uname().nodename not in text
    assert "processor" in text
    assert available_bytes() > 0


@pytest.mark.parametrize(("own", "cores"), [(1.0, 1.0), (3.0, 0.0), (4.0, 0.0)])
def test_other_work_is_what_the_ranks_did_not_do(own: float, cores: float) -> None:
    before, after = Usage(10.0, 100.0, 0.0), Usage(12.0, 103.0, 0.0)
    assert other_cores(before, after, own) == cores
    assert other_cores(Usage(0, None, 0), after, own) is None
    assert usage().own_s > 0
