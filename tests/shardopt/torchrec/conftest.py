"""Answers of searches that tests of the hook share."""

import pytest


@pytest.fixture(autouse=True)
def shared_answers(kept_answers: None) -> None:
    """What one planner searched is not searched again for another."""
