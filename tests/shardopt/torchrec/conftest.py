"""Without TorchRec none of these tests is collected; with it, they share answers of searches."""

from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("torchrec") else ["*.py"]


@pytest.fixture(autouse=True)
def shared_answers(kept_answers: None) -> None:
    """Share one planner's searches with the other planners."""
