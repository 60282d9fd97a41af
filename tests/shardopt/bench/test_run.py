"""What `bench run` decides without any rank: names of plans, the environment, other work."""

import json
import os
from pathlib import Path

import pytest

from shardopt.bench.job import available_bytes
from shardopt.bench.run import environment
from shardopt.cli.bench.run import plan_names
from shardopt.measure.load import Usage, other_cores, usage


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
