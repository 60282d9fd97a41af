"""Measured gains of advice: models of the task sets with and without it, on CPU ranks.

For every model the best plan is searched on a calibrated profile. For each of `SETTINGS` the step
of the largest change runs for real beside the unchanged model, in the runtime of the profile. Each
needs its own ranks, and the same model differs by 10 % from one start of ranks to the next. So
models take turns, in another order each time, and a gain is the median over turns. The unchanged
model runs twice in each turn, which shows the noise. Measurements are in rows files in the folder,
so the same command continues after an interruption.
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
"""Settings under test; not index dedup, which FBGEMM has on GPUs only."""
EXPECTED = 0.03
"""Expected gain or loss above which the sign must be right."""
NEAR = 0.05
"""Largest error of an expected gain that counts as near, as a fraction."""
EFFORT = 0.2
"""Effort of the search of the plans."""
AT_ONCE = 2
"""Rounds of one model in a turn."""
AS_IS, AGAIN, PLAN = "as-is", "as-is-again", "plan"
REPORT = "advice.json"
Say = Callable[[str], None]


@dataclass(frozen=True)
class AdviceSettings:
    """Settings of a measurement of advice.

    Args:
        folder: created if missing.
        tasks: seeds of the models.
        hardware: profile of this machine, from `shardopt calibrate`.
        rounds, block: as in `Job`, for each model.
        models: family that models are drawn from.
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
    """Step with its expected and measured gain, as fractions of the time per sample.

    Args:
        noise: measured gain of the unchanged model over itself.
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
        """True if the sign is right, or the expected gain too small to have one."""
        return abs(self.expected) <= EXPECTED or self.expected * self.measured > 0

    @property
    def near(self) -> bool:
        """True if the size is right within `NEAR`."""
        return abs(self.expected - self.measured) <= NEAR


def measure_advice(settings: AdviceSettings, say: Say) -> list[Checked]:
    """Measure what is missing and report all.

    Raises:
        ShardoptError: the ranks cannot be started, or one died; finished rows stay.
    """
    settings.folder.mkdir(parents=True, exist_ok=True)
    checked: list[Checked] = []
    for seed in settings.tasks:
        checked += _measure_task(settings, seed, say)
        rows = [{**asdict(s), "sign_right": s.sign_right, "near": s.near} for s in checked]
        about = {"hardware": settings.hardware, "environment": environment("gloo"), "rows": rows}
        atomic_write_text(settings.folder / REPORT, json.dumps(about, indent=1) + "\n")
    return checked


def summary(checked: Sequence[Checked]) -> list[str]:
    """Return a line for each step, and the shares that are right."""
    lines = [
        f"task {step.task}: {step.name} {step.value}{f' on {step.target}' if step.target else ''}: "
        f"expected {step.expected:+.1%}, measured {step.measured:+.1%}"
        for step in checked
    ]
    large = [step for step in checked if abs(step.expected) > EXPECTED]
    signs, near = sum(step.sign_right for step in large), sum(step.near for step in checked)
    noise = {step.task: abs(step.noise) for step in checked}
    return [
        *lines,
        f"a model against itself: {statistics.fmean(noise.values()):.1%} in the mean",
        f"sign right in {signs} of {len(large)} where more than {EXPECTED:.0%} was expected",
        f"within {NEAR:.0%} of the time per sample in {near} of {len(checked)}",
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
    cases |= {step.steps[0].name: (step.case.workload, step.plan) for step in steps}
    rows = _run(settings, seed, cases, Runtime(hardware.runtime or Runtime.PLAIN), say)
    times = {name: _by_turn(bench_rows) for name, bench_rows in rows.items()}
    as_is = [statistics.fmean(pair) for pair in zip(times[AS_IS], times[AGAIN], strict=True)]
    noise = _gain(times[AGAIN], times[AS_IS])
    return [
        Checked(
            seed,
            step.steps[0].name,
            step.steps[0].target,
            str(step.steps[0].value),
            step.gain,
            _gain(times[step.steps[0].name], as_is),
            noise,
        )
        for step in steps
    ]


def _largest(advisor: Advisor) -> Iterator[Advice]:
    """Yield the step of the largest gain or loss for each setting."""
    tried: Iterable[Advice | None] = (
        advisor.found([step], advisor.plan) for step in advisor.steps() if step.name in SETTINGS
    )
    largest: dict[str, Advice] = {}
    for advice in filter(None, tried):
        name = advice.steps[0].name
        if name not in largest or abs(advice.gain) > abs(largest[name].gain):
            largest[name] = advice
    yield from largest.values()


def _run(
    settings: AdviceSettings,
    seed: int,
    cases: dict[str, tuple[Workload, ShardingPlan]],
    runtime: Runtime,
    say: Say,
) -> dict[str, BenchRows]:
    """Measure the models in turns until each has all rounds; return their rows."""
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
    """Return the median ms of an iteration in each turn, per sample of a rank."""
    rounds = rows.samples_ms(PLAN)
    turns = [rounds[i : i + AT_ONCE] for i in range(0, len(rounds), AT_ONCE)]
    if not turns:
        raise InputError("nothing was measured of a model; give at least one round")
    medians = (statistics.median(ms for of_round in turn for ms in of_round) for turn in turns)
    return [ms / int(rows.model["batch_size"]) for ms in medians]


def _gain(times: Sequence[float], before: Sequence[float]) -> float:
    """Return the median gain over turns, as a fraction of the time before."""
    return 1 - statistics.median(a / b for a, b in zip(times, before, strict=True))
