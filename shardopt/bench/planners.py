"""Comparison of the search with TorchRec's planner: time to plan, and the two plans.

TorchRec's planner runs in processes of its own: where torch is loaded, our search takes one core
(docs/decisions/0029-time-of-a-search.md).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from predictor.errors import ShardoptError
from predictor.model.plan import ShardingPlan
from predictor.model.topology import Topology
from predictor.model.workload import Workload
from predictor.predict import Prediction, predict
from search.problem import Problem, Result
from search.solve import solve
from search.stop import Stop
from shardopt.measure.machine import machine
from shardopt.measure.sampling import Samples, interleave
from shardopt.ranks.calls import CallServer
from shardopt.ranks.launch import python_path

SEARCH = "shardopt search"
COMMAND = "shardopt plan"
TORCHREC = "torchrec planner"
_TorchRecAnswer = tuple[ShardingPlan | None, float, float | None]


class CommandError(ShardoptError):
    """`shardopt plan`, run as a separate process, failed."""


@dataclass(frozen=True)
class PlannerResult:
    """One planner's plan, and its prediction by shardopt; both None where there is no plan."""

    plan: ShardingPlan | None
    prediction: Prediction | None

    @property
    def fits(self) -> bool | None:
        """Tell if all ranks have room for the plan by shardopt's count; None without a plan."""
        if self.prediction is None:
            return None
        return all(rank.fits for rank in self.prediction.memory)


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison.

    Args:
        times: of `SEARCH` (the search alone), `COMMAND` (a whole process: start-up, reading the
            model, search, output) and `TORCHREC` (its planner alone, the model being there).
        result: of the last search.
        rating_ms: TorchRec's own cost of its plan; no iteration time.
        machine: where this was measured; its load is that before the first round.
    """

    times: dict[str, Samples]
    result: Result
    ours: PlannerResult
    theirs: PlannerResult
    rating_ms: float | None
    machine: dict[str, object]


def compare(
    problem: Problem,
    words: Sequence[str],
    stop: Callable[[], Stop],
    seed: int,
    rounds: int,
    on_start: Callable[[str, int], None],
) -> Comparison:
    """Run both planners and the command, alternating.

    Args:
        words: of the `shardopt plan` command that does the same search.

    Raises:
        InfeasibleError: shardopt finds no plan that fits.
        InputError: TorchRec cannot build the model.
        CommandError: the command failed.
        CallError: TorchRec's planner did.
        MissingPackageError: TorchRec is not installed.
    """
    server = CallServer(["shardopt.training.torchrec_planner"])
    # refuse a model that TorchRec cannot build before time is spent
    server.call(None, _build, problem.workload)
    where = machine()
    results: list[Result] = []
    answers: list[_TorchRecAnswer] = []

    def search() -> float:
        start = time.perf_counter()
        results.append(solve(problem, stop(), seed))
        return time.perf_counter() - start

    def torchrec() -> float:
        inputs = problem.workload, problem.topology, problem.hardware.device
        answers.append(server.call(None, ask_torchrec, *inputs))
        return answers[-1][1]

    calls = {SEARCH: search, COMMAND: lambda: _time_command(words), TORCHREC: torchrec}
    times = interleave(calls, rounds, on_start)
    plan, _, rating_ms = answers[-1]
    ours, theirs = (_answer(problem, answer_plan) for answer_plan in (results[-1].best.plan, plan))
    return Comparison(times, results[-1], ours, theirs, rating_ms, where)


def ask_torchrec(workload: Workload, topology: Topology, device: str) -> _TorchRecAnswer:
    """Plan, seconds and rating; `TorchRecAnswer` can only be read where torch is loaded."""
    from shardopt.training.torchrec_planner import plan_with_torchrec

    answer = plan_with_torchrec(workload, topology, device)
    return answer.plan, answer.seconds, answer.rating_ms


def _build(workload: Workload) -> None:
    """Fails where TorchRec cannot build the model."""
    from shardopt.training.torchrec_planner import planner_inputs

    planner_inputs(workload)


def _time_command(words: Sequence[str]) -> float:
    """Seconds of the command as its script runs it: these packages, not those of the directory."""
    command = [sys.executable, "-P", "-m", "shardopt", "plan", *words, "--quiet"]
    environment = {**os.environ, "PYTHONPATH": python_path()}
    start = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise CommandError(
            f"'shardopt plan', run as a process, ended with exit code {done.returncode}: "
            f"{done.stderr.strip() or 'no message'}"
        )
    return seconds


def _answer(problem: Problem, plan: ShardingPlan | None) -> PlannerResult:
    if plan is None:
        return PlannerResult(None, None)
    return PlannerResult(plan, predict(problem.workload, problem.topology, problem.hardware, plan))
