"""Description of a machine: it names no host, and tells other work from that of the ranks."""

import json
import os

import pytest

from shardopt.measure.machine import Usage, available_bytes, environment, other_cores, usage


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
