"""A captured step of a small model."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an execution trace and a Kineto trace of one rank."""
    pytest.importorskip("torch")
    from tests.shardopt.replay.captured import capture, small_step

    return capture(small_step(), tmp_path_factory.mktemp("traces"))
