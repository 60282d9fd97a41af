"""Whether advice is right: models of the task sets with and without it, measured on CPU ranks.

For every model the best plan is searched on a calibrated profile, and of each of `SETTINGS` the
step that changes most is run for real beside the model as it is, in the runtime of the profile.
Each needs ranks of its own, and the same model differs by 10 % from one start of ranks to the next.
So models take turns, in another order each time, a gain is the median over turns, and the model as
it is runs twice in each, which shows the noise. What is measured is in rows files in the folder, so
that the same command goes on where it was interrupted.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lab.tasks.models import SHAPES, draw_model
from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.model.plan import ShardingPlan
from predictor.model.topology import Topology
from predictor.model.workload import Workload
from search.solve import solve
from search.stop import Stop
from search.tune.advice import Advice, Advisor
from search.tune.knobs import Case
from shardopt.bench.job import Job
from shardopt.bench.rows import BenchRows, read_rows
from shardopt.bench.run import run_bench
from shardopt.config import load_model
from shardopt.config.write import write_model
from shardopt.files import atomic_write_text
from shardopt.measure.machine import environment
from shardopt.ranks.realtime import Runtime

SETTINGS = ("qcomm", "batch_size", "train_pipeline", "id_order")
"""Index dedup is not among them, as FBGEMM has it on GPUs alone."""
EXPECTED = 0.03
"""Gains and losses that are larger must have the right sign."""
NEAR = 0.05
"""Points by which an expected gain may be wrong."""
EFFORT = 0.2
"""Of the search of the plans."""
AT_ONCE = 2
"""Rounds of one model before the other has its turn."""
AS_IS, AGAIN, PLAN = "as-is", "as-is-again", "plan"
REPORT = "advice.json"
Say = Callable[[str], None]


@dataclass(frozen=True)
class AdviceSettings:
    """What to measure.

    Args:
        folder: made if it is not there.
        tasks: seeds of the models.
        hardware: profile of this machine, from `shardopt calibrate`.
        rounds, block: of each model, as `Job` has them.
        models: the family that they are drawn from.
    """

    folder: Path
    tasks: Sequence[int]
    hardware: str
    rounds: int = 10
    block: int = 6
    world_size: int = 2
    models: str = SHAPES


@dataclass(frozen=True)
class Checked:
    """A step with its expected and measured gain, shares of the time per sample.

    Args:
        noise: what the model as it is gained over itself.
    """

    task: int
    name: str
    target: str | None
    value: str
    expected: float
    measured: float
    noise: float

    @property
    def sign_right(self) -> bool:
        """Or the expected gain is too small to have a sign."""
        return abs(self.expected) <= EXPECTED or self.expected * self.measured > 0

    @property
    def near(self) -> bool:
        """The size is right, too."""
        return abs(self.expected - self.measured) <= NEAR


def measure_advice(settings: AdviceSettings, say: Say) -> list[Checked]:
    """Measure what is missing and report all.

    Raises:
        ShardoptError: the ranks cannot be started, or one died; what is measured stays.
    """
    settings.folder.mkdir(parents=True, exist_ok=True)
    found: list[Checked] = []
    for seed in settings.tasks:
        found += _measure_task(settings, seed, say)
        rows = [{**asdict(one), "sign_right": one.sign_right, "near": one.near} for one in found]
        about = {"hardware": settings.hardware, "environment": environment("gloo"), "rows": rows}
        atomic_write_text(settings.folder / REPORT, json.dumps(about, indent=1) + "\n")
    return found


def summary(found: Sequence[Checked]) -> list[str]:
    """A line for each step, and the shares that are right."""
    lines = [
        f"task {one.task}: {one.name} {one.value}{f' on {one.target}' if one.target else ''}: "
        f"expected {one.expected:+.1%}, measured {one.measured:+.1%}"
        for one in found
    ]
    large = [one for one in found if abs(one.expected) > EXPECTED]
    signs, near = sum(one.sign_right for one in large), sum(one.near for one in found)
    noise = {one.task: abs(one.noise) for one in found}
    return [
        *lines,
        f"a model against itself: {statistics.fmean(noise.values()):.1%} in the mean",
        f"sign right in {signs} of {len(large)} where more than {EXPECTED:.0%} was expected",
        f"within {NEAR:.0%} of the time per sample in {near} of {len(found)}",
    ]


def _measure_task(settings: AdviceSettings, seed: int, say: Say) -> list[Checked]:
    hardware = load_hardware(settings.hardware)
    memory = environment("gloo")["memory_bytes"] // (2 * settings.world_size)
    ranks = Topology.uniform(settings.world_size, hbm_bytes=0, ddr_bytes=memory)
    case = Case(draw_model(settings.models, seed), ranks, hardware)
    best = solve(case.problem(), Stop(EFFORT), seed=0).best
    advisor = Advisor(case, best.plan, best.iteration_ms)
    steps = list(_largest(advisor))
    cases = dict.fromkeys((AS_IS, AGAIN), (case.workload, best.plan))
    cases |= {one.steps[0].name: (one.case.workload, one.plan) for one in steps}
    rows = _run(settings, seed, cases, Runtime(hardware.runtime or Runtime.PLAIN), say)
    times = {name: _by_turn(of) for name, of in rows.items()}
    as_is = [statistics.fmean(pair) for pair in zip(times[AS_IS], times[AGAIN], strict=True)]
    noise = _gain(times[AGAIN], times[AS_IS])
    return [
        Checked(
            seed,
            one.steps[0].name,
            one.steps[0].target,
            str(one.steps[0].value),
            one.gain,
            _gain(times[one.steps[0].name], as_is),
            noise,
        )
        for one in steps
    ]


def _largest(advisor: Advisor) -> Iterator[Advice]:
    """Of each setting what changes most, for better or worse."""
    tried: Iterable[Advice | None] = (
        advisor.found([step], advisor.plan) for step in advisor.steps() if step.name in SETTINGS
    )
    largest: dict[str, Advice] = {}
    for one in filter(None, tried):
        name = one.steps[0].name
        if name not in largest or abs(one.gain) > abs(largest[name].gain):
            largest[name] = one
    yield from largest.values()


def _run(
    settings: AdviceSettings,
    seed: int,
    cases: dict[str, tuple[Workload, ShardingPlan]],
    runtime: Runtime,
    say: Say,
) -> dict[str, BenchRows]:
    """The rows of every model, measured by turns until each has all rounds."""
    paths = {name: settings.folder / f"task-{seed:03d}.{name}.rows.json" for name in cases}
    for turn, done in enumerate(range(AT_ONCE, settings.rounds + AT_ONCE, AT_ONCE)):
        names = [*cases]
        random.Random(turn).shuffle(names)
        for name in names:
            workload, plan = cases[name]
            path, rounds = paths[name], min(done, settings.rounds)
            if path.exists() and len(read_rows(path).rounds) >= rounds:
                continue
            written = path.with_name(path.name.replace(".rows.json", ".yaml"))
            if not written.exists():
                write_model(written, workload)
            job = Job(
                load_model(written),
                {PLAN: plan},
                rounds=rounds,
                block=settings.block,
                seed=seed,
                runtime=runtime,
            )
            title = f"task {seed}, {name}, {rounds} of {settings.rounds} rounds"
            run_bench(job, path, say=lambda text, title=title: say(f"{title}: {text}"))  # type: ignore[misc]
    return {name: read_rows(path) for name, path in paths.items()}


def _by_turn(rows: BenchRows) -> list[float]:
    """Median time of an iteration in each turn, per sample of a rank, in ms."""
    rounds = rows.samples_ms(PLAN)
    turns = [rounds[i : i + AT_ONCE] for i in range(0, len(rounds), AT_ONCE)]
    if not turns:
        raise InputError("nothing was measured of a model; give at least one round")
    medians = (statistics.median(ms for of_round in turn for ms in of_round) for turn in turns)
    return [ms / int(rows.model["batch_size"]) for ms in medians]


def _gain(times: Sequence[float], before: Sequence[float]) -> float:
    """Median over turns, a share of the time before."""
    return 1 - statistics.median(a / b for a, b in zip(times, before, strict=True))
