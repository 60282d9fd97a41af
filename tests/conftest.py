"""Settings that all tests share."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# On a busy machine any example may be slow; time says nothing about correctness. CI repeats the
# same examples every time, runs elsewhere look for new ones.
settings.register_profile(
    "shardopt",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("shardopt")
