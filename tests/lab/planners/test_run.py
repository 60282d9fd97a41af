"""Modules that the process of a planner loads."""

from __future__ import annotations

import subprocess
import sys

OURS = """
import sys
from shardopt.bench import planners as compare
from lab.planners import suite
from lab.planners.instances import Instance
from lab.planners.run import PlannerSettings, run_planner

outcome = run_planner("shardopt", Instance(3, 2, 1, 0.3), PlannerSettings(effort=0.001))
assert outcome.iteration_ms
assert suite.sources_of("shardopt")
print("torch" in sys.modules)
"""


def test_our_planner_runs_without_torch() -> None:
    """With torch in its process a search takes one core, which is not what `shardopt plan` does."""
    done = subprocess.run([sys.executable, "-c", OURS], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("False\n", 0), done.stderr
