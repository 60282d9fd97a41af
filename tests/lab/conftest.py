"""The commands of the laboratory, run in this process."""

from collections.abc import Callable
from functools import partial

import pytest

from lab.cli import main
from tests.conftest import Done


@pytest.fixture
def run(run_main: Callable[..., Done]) -> Callable[..., Done]:
    """Runs `python -m lab`."""
    return partial(run_main, main)
