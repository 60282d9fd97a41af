"""How much of a foretold gain is the search's own choice: ``python -m lab selection-effect``.

Random models are planned, and the gain over TorchRec's default plan is held against a simulated
truth, for both ways in which a cost can be wrong:

around: the truth lies around the prediction, as with what a cost model leaves unexplained. The
    search sees the costs of the profile, and truths are drawn around them.
behind: the prediction lies around the truth, as with noise in a calibration. The truth is what the
    profile gives, and the search sees costs with errors.

Errors are those that the profile states (`predictor.cost.errors`). A line gives, for so many
tables, the mean gain if every cost were as predicted (nominal), the expected gain, the true gain,
how often the 90 % interval holds the truth, and the true gain of the fastest plan found in place of
the preferred one. All in per cent of the iteration time of TorchRec's plan.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lab.programs import make_parser
from lab.tasks import draw
from predictor.cost.errors import CostErrors, known_errors
from predictor.hardware.loader import load_hardware
from predictor.model.distribution import Uniform, Zipf
from predictor.model.plan import ShardingPlan
from predictor.model.workload import DenseArch, Feature, Table, Workload
from search.baselines.starting_plans import TORCHREC
from search.expected_gain import expected_gain, gains
from search.problem import Problem, Result
from search.solve import solve
from search.stop import Stop

Array = NDArray[np.float64]

SEARCHERS = ("cpsat", "optuna")
"""Without those that the lower bound proposes: it knows the profile's costs only."""
TRUTHS = 200
"""Draws of the truth around one prediction."""
TRUTH_SEED = 1_000_000


class Outcome(NamedTuple):
    """Gains of one plan, as fractions of the time of TorchRec's."""

    nominal: float
    expected: float
    true: float
    held: float
    """Share of the truths that the interval holds."""
    fastest: float
    """True gain of the fastest plan found."""


def draw_model(seed: int, tables: int, batch: int) -> Workload:
    """A model with the distributions of `lab.tasks.draw`, in a size of its own."""
    rng = random.Random(f"selection {seed} {tables}")
    found = []
    for i in range(tables):
        rows = rng.lognormvariate(math.log(draw.MEDIAN_ROWS), draw.ROWS_SIGMA)
        pooling = math.exp(rng.uniform(*map(math.log, draw.POOLING)))
        ids = Uniform() if rng.random() < 0.5 else Zipf(round(rng.uniform(*draw.ALPHA), 2))
        feature = Feature(f"f{i}", round(pooling, 1), distribution=ids)
        size = int(min(max(rows, draw.ROWS[0]), draw.ROWS[1]))
        found.append(Table(f"t{i}", size, rng.choice(draw.DIMS), (feature,)))
    dense = DenseArch(13, (256, 64), (256, 1), "concat")
    return Workload(f"selection_{seed}", batch, tuple(found), dense)


def run(problem: Problem, effort: float, worlds: int, seed: int) -> Iterator[tuple[str, Outcome]]:
    """Both experiments on one model; nothing where TorchRec's planner has no plan.

    Args:
        worlds: searches with other errors.
    """
    sizes = known_errors(problem.hardware, problem.topology)
    result = solve(problem, Stop(effort), 0, searchers=SEARCHERS)
    theirs = result.baseline_plans.get(TORCHREC)
    if theirs is None:
        return
    truths = _gains(problem, result, theirs, TRUTH_SEED + seed)
    yield "around", _outcome(problem, result, theirs, *truths)
    for world in range(worlds):
        tables = len(problem.workload.tables)
        errors = CostErrors(sizes, 1, TRUTH_SEED * tables + 1000 * seed + world)
        wrong = replace(problem, errors=errors)
        result = solve(wrong, Stop(effort), 0, searchers=SEARCHERS)
        best, fastest = (
            np.array([gains(problem, plan, theirs, draws=2, seed=0)[0]]) for plan in _both(result)
        )
        yield "behind", _outcome(wrong, result, theirs, best, fastest)


def _both(result: Result) -> tuple[ShardingPlan, ShardingPlan]:
    """The preferred and the fastest plan."""
    return result.best.plan, (result.fastest or result.best).plan


def _gains(
    problem: Problem, result: Result, theirs: ShardingPlan, seed: int
) -> tuple[Array, Array]:
    """True gains of the preferred and of the fastest plan, ``[truths]`` each."""
    best, fastest = (
        gains(problem, plan, theirs, draws=TRUTHS, seed=seed)[1] for plan in _both(result)
    )
    return best, fastest


def _outcome(
    problem: Problem, result: Result, theirs: ShardingPlan, best: Array, fastest: Array
) -> Outcome:
    found = expected_gain(problem, result.best.plan, theirs, TORCHREC)
    low, high = found.interval
    held = float(np.mean((best >= low) & (best <= high)))
    return Outcome(found.nominal, found.mean, float(best.mean()), held, float(fastest.mean()))


def main() -> None:
    """Print a table: experiment, tables, models, gains."""
    parser = make_parser(__file__, __doc__)
    parser.add_argument("--hardware", default="cpu-gloo", help="a profile, cpu-gloo by default")
    parser.add_argument("--ranks", type=int, default=2, help="2 by default")
    parser.add_argument("--batch", type=int, default=1024, help="per rank, 1024 by default")
    parser.add_argument("--tables", type=int, nargs="+", default=[8, 16, 24])
    parser.add_argument("--models", type=int, default=4, help="of each size, 4 by default")
    parser.add_argument("--first", type=int, default=0, help="seed of the first, 0 by default")
    parser.add_argument("--worlds", type=int, default=4, help="searches with errors, of each model")
    parser.add_argument("--effort", type=float, default=0.1, help="of a search, 0.1 by default")
    asked = parser.parse_args()
    hardware = load_hardware(asked.hardware)
    topology = draw.task_topology(hardware, asked.ranks, asked.ranks)
    print("| costs | tables | models | nominal | expected | true | interval holds | fastest |")
    print("|---|---|---|---|---|---|---|---|")
    for tables in asked.tables:
        found: dict[str, list[Outcome]] = {"around": [], "behind": []}
        for seed in range(asked.first, asked.first + asked.models):
            problem = Problem(draw_model(seed, tables, asked.batch), topology, hardware)
            for name, outcome in run(problem, asked.effort, asked.worlds, seed):
                found[name].append(outcome)
        for name, outcomes in found.items():
            cells = [f"{100 * value:.1f} %" for value in np.mean(outcomes, axis=0)]
            print(f"| {name} | {tables} | {len(outcomes)} |", " | ".join(cells), "|", flush=True)


if __name__ == "__main__":
    main()
