"""Which constants decide: those whose stated error could make another plan the fastest.

All constants of a group share one error (`predictor.cost.errors`). One pass scores the plans that
are known under factors on the times of each group, over `REACH` stated errors either way. Where
another plan gains, the factor at which the two change places is bisected on a profile with that
group scaled, and what the other one gains is predicted in full.

Why: docs/decisions/0030-choosing-among-plans.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from predictor.cost.errors import CostErrors, ErrorSize, known_errors, resource_groups
from predictor.cost.loads import ShardLoads
from predictor.errors import InfeasibleError
from predictor.hardware.scaling import is_rate, scale_group
from predictor.hardware.schema import CpuEmbedding, ProvenanceKind, weakest
from predictor.model.plan import ShardingPlan, TablePlan
from predictor.model.plan_check import match_plan
from search.baselines.starting_plans import TORCHREC, plan_baselines
from search.expected_gain import INSANE
from search.objective import Objective
from search.problem import Problem, Result
from search.space.enumerate import whole_space
from search.surrogate import Surrogate
from shardopt.formatting import KIND_WORDS, percent

Array = NDArray[np.float64]

REACH = 2.0
"""Stated errors either way: nineteen times in twenty a constant is as near."""
STEPS = np.linspace(-1, 1, 17)
"""Scored points of the reach; the middle one is the profile as it is."""
LEAST = 0.01
"""Gain below which another plan is no reason to measure."""
ALIKE = 1e-3
"""Plans within this share of each other have not changed places."""
CLOSE = 2e-3
"""Share of a factor within which the place of a flip is found."""
MOST_RANKS = 1024
"""Most ranks for other methods: beyond, they take seconds."""
RIVAL = "the plan "
"""Begins names that are words already."""
LOOKUP_FREE = ("gemm", "elementwise", "overheads", "collectives")
"""Groups that no lookup depends on, so that loads of shards stay."""

MEASURED_ALONE = {
    "overheads": "host",
    "embedding": "embedding",
    "gemm": "gemm",
    "collectives": "collectives",
}
"""Group of a profile -> what ``calibrate --only`` calls it; all others take a whole calibration."""
SOON = {"overheads": " in less than a minute"}
"""Time of the measuring command, where it is known."""


@dataclass(frozen=True)
class DecidingConstant:
    """A constant whose stated error could make another plan the faster one.

    Args:
        group: of the profile.
        constant: ``group.key``, by which the group's times are named; the others move along.
        unit: of the constant, in words.
        value: of the constant, in the profile.
        rel_error: 1-sigma relative error of the group's times, as stated.
        provenance: of the group.
        flips_at: the value from which on the other plan is the faster one.
        side: of that value on which it is.
        plan: what the other plan is called.
        gain: most of the time in use that the other plan saves within `REACH` stated errors.
        worth: expected share of the iteration that is saved by knowing the value before choosing
            among the plans compared, under the stated error.
        command: what measures the group.
    """

    group: str
    constant: str
    unit: str
    value: float
    rel_error: float
    provenance: ProvenanceKind
    flips_at: float
    side: Literal["below", "above"]
    plan: str
    gain: float
    worth: float
    command: str

    @property
    def unmeasured(self) -> bool:
        """Nobody has measured the group on such a device."""
        return self.provenance != "measured"


def deciding_constants(
    problem: Problem, plan: ShardingPlan, other_plans: Mapping[str, ShardingPlan]
) -> list[DecidingConstant]:
    """Find the constants that decide between a plan and others: first those that nobody has
    measured, the most worth measuring first.

    Args:
        other_plans: name -> plan; those that are the plan itself are left out.

    Raises:
        PlanError: a plan does not cover the problem's tables or ranks.
    """
    rivals = {name: other for name, other in other_plans.items() if other.tables != plan.tables}
    if not rivals:
        return []
    inputs = problem.workload, problem.topology, problem.hardware
    problem = replace(problem, loads=problem.loads or ShardLoads(*inputs))
    sizes = known_errors(problem.hardware, problem.topology)
    resources = [name for name, size in sizes.items() if size.shared > 0]
    scorer = problem.scorer
    numbers = [
        [scorer.number(i, table) for i, table in enumerate(_match(problem, candidate))]
        for candidate in (plan, *rivals.values())
    ]
    perturbed = problem.perturbed(scorer, _OneByOne(sizes, resources))
    times = perturbed.score_numbered(np.array(numbers)).reshape(
        len(numbers), len(resources), len(STEPS)
    )
    constants = [
        constant
        for row, resource in enumerate(resources)
        for constant in _of_group(problem, plan, rivals, resource, sizes[resource], times[:, row])
    ]
    return sorted(constants, key=lambda c: (not c.unmeasured, -c.worth, -c.gain, c.side == "below"))


def deciding_text(c: DecidingConstant) -> str:
    """Say what is assumed, what follows if it is otherwise, and what measures it."""
    return (
        f"The profile assumes {c.value:.3g} {c.unit} ({KIND_WORDS[c.provenance]}, known to "
        f"within {percent(c.rel_error)}). If it is {c.side} {c.flips_at:.3g}, "
        f"{plan_words(c.plan)} is faster, by up to {percent(c.gain)}; `{c.command}` measures "
        f"it{SOON.get(c.group, '')}."
    )


def measuring_command(group: str, device: str) -> str:
    """Return the command that measures a group, and as little else as possible.

    Args:
        device: ``cuda`` or ``cpu``, of the profile.
    """
    backend = "" if device == "cpu" else " --backend nccl"
    only = f" --only {MEASURED_ALONE[group]}" if group in MEASURED_ALONE else ""
    return f"shardopt calibrate{backend}{only}"


def plan_words(name: str) -> str:
    """Name a plan in a sentence: ``plan 2``, or whose baseline it is."""
    if name.startswith(("plan ", RIVAL)):
        return name
    return "TorchRec's plan" if name == TORCHREC else f"the baseline plan '{name}'"


def usual_plans(problem: Problem) -> dict[str, ShardingPlan]:
    """Return the plans of other methods, where no search has any; none on very many ranks."""
    if problem.topology.world_size > MOST_RANKS:
        return {}
    try:
        objective = Objective(problem, whole_space(problem))
    except InfeasibleError:
        return {}
    plans = plan_baselines(objective, Surrogate(objective), seed=0)
    return {
        name: objective.sharding_plan(plan) for name, plan in plans.items() if name not in INSANE
    }


def known_plans(result: Result) -> dict[str, ShardingPlan]:
    """Return the plans that a search's best plan is compared with: name -> plan."""
    ranked = {f"plan {i}": r.plan for i, r in enumerate(result.plans[1:], start=2)}
    sane = {name: plan for name, plan in result.baseline_plans.items() if name not in INSANE}
    return {**ranked, **sane}


class _OneByOne(CostErrors):
    """Draws in which one resource after the other takes each of the `STEPS`."""

    def __init__(self, sizes: Mapping[str, ErrorSize], resources: Sequence[str]) -> None:
        super().__init__(sizes, len(resources) * len(STEPS), seed=0)
        self._place = {name: i for i, name in enumerate(resources)}

    def _normal(self, name: str) -> Array:
        normal = np.zeros((len(self._place), len(STEPS)))
        if name in self._place:
            normal[self._place[name]] = REACH * STEPS
        return normal.ravel()


def _of_group(
    problem: Problem,
    plan: ShardingPlan,
    rivals: Mapping[str, ShardingPlan],
    resource: str,
    size: ErrorSize,
    times: Array,
) -> Iterator[DecidingConstant]:
    """Yield what a resource decides below and above its stated value, ``times [plans, STEPS]``."""
    gains = 1 - times[1:] / times[0]
    # a gain at the stated value needs no measurement
    beyond = gains - np.maximum(0.0, gains[:, len(STEPS) // 2, None])
    chance = np.exp(-((REACH * STEPS) ** 2) / 2)
    worth = float((chance / chance.sum()) @ np.maximum(0.0, beyond.max(axis=0)))
    constant, unit, value = named_constant(resource, problem)
    groups = [problem.hardware.groups[n] for n in resource_groups(resource, problem.topology)]
    for side in (STEPS < 0, STEPS > 0):
        one_sided = np.where(side, beyond, -math.inf)
        rival, step = (int(i) for i in np.unravel_index(one_sided.argmax(), one_sided.shape))
        if one_sided[rival, step] < LEAST:
            continue
        name = list(rivals)[rival]
        gain = partial(_gain, problem, resource, plan, rivals[name])
        logs = size.shared * REACH * STEPS
        far, stated = gain(math.exp(logs[step])), max(0.0, gain(1.0))
        if far - stated < LEAST:
            continue
        at = _flip(gain, stated + ALIKE, beyond[rival], step, logs)
        rate = is_rate(constant)
        yield DecidingConstant(
            group=resource,
            constant=f"{resource}.{constant}",
            unit=unit,
            value=value,
            rel_error=size.shared,
            provenance=weakest(tuple(group.provenance.kind for group in groups)),
            flips_at=value / at if rate else value * at,
            side="below" if (logs[step] < 0) != rate else "above",
            plan=name,
            gain=far,
            worth=worth,
            command=measuring_command(resource, problem.hardware.device),
        )


def _gain(
    problem: Problem, resource: str, plan: ShardingPlan, other: ShardingPlan, factor: float
) -> float:
    """Share of a plan's time that another one saves where the times of a group are multiplied."""
    hardware = scale_group(problem.hardware, resource, factor)
    loads = problem.loads if resource in LOOKUP_FREE else None
    scaled = replace(problem, hardware=hardware, loads=loads)
    ours, theirs = scaled.scorer.score([_match(scaled, plan), _match(scaled, other)])
    return float(1 - theirs / ours)


def _flip(
    gain: Callable[[float], float], least: float, gains: Array, step: int, logs: Array
) -> float:
    """Find the factor at which the other plan becomes the faster one.

    Args:
        least: gain from which on it is.
        gains: of the pass, ``[STEPS]``, at the factors of which there are ``logs``; the other plan
            is the faster one at ``step``.
    """
    middle = len(STEPS) // 2
    towards = -1 if step > middle else 1
    at = step
    while at != middle and gains[at] > ALIKE:
        at += towards
    near, beyond = float(logs[at]), float(logs[at - towards])
    if near and gain(math.exp(near)) > least:
        near, beyond = 0.0, near  # the pass found it later than predictions do
    while abs(beyond - near) > CLOSE:
        between = (near + beyond) / 2
        if gain(math.exp(between)) > least:
            beyond = between
        else:
            near = between
    return math.exp(beyond)


def _match(problem: Problem, plan: ShardingPlan) -> Sequence[TablePlan]:
    return match_plan(problem.workload, problem.topology, plan)


def named_constant(resource: str, problem: Problem) -> tuple[str, str, float]:
    """The constant that stands for a group: its key, its unit in words, and its value."""
    hardware = problem.hardware
    if resource == "gemm":
        rates = {str(kind): rate for kind, rate in hardware.gemm.tflops.items()}
        data_type = str(getattr(problem.workload.dense, "data_type", "fp32"))
        kind = data_type if data_type in rates else next(iter(rates))
        return "tflops", f"TFLOP/s in {kind} products", rates[kind]
    if resource == "collectives":
        # the line rate between hosts, or what a byte of an all-to-all within one costs
        if problem.topology.groups > 1:
            return "nic_gbit_s", "Gbit/s of a NIC", hardware.collectives.inter.nic_gbit_s
        cost = hardware.collectives.intra.all_to_all.us_per_mib[-1]
        return "us_per_mib", "us a MiB of an all-to-all", cost
    if resource == "embedding" and isinstance(hardware.embedding, CpuEmbedding):
        constant, unit = "forward_ns_per_row", "ns a row in lookups"
    else:
        constant, unit = _NAMED[resource]
    return constant, unit, float(getattr(getattr(hardware, resource), constant))


_NAMED = {
    "overheads": ("op_us", "us to launch an op"),
    "embedding": ("forward_efficiency", "of the memory's bandwidth in lookups"),
    "elementwise": ("efficiency", "of the memory's bandwidth in memory-bound ops"),
    "memory": ("host_link_gb_s", "GB/s between host and device"),
}
