"""Which constants decide: those whose stated error could make another plan the fastest.

All constants of a group share one error (`predictor.cost.errors`). One pass scores the plans that
are known under factors on the times of each group, over `REACH` stated errors either way. Where
another plan gains, the factor at which the two change places is bisected on a profile with that
group scaled, and what the other one gains is predicted in full.

Why: docs/decisions/0030-choosing-among-plans.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from predictor.cost.errors import CostErrors, ErrorSize, known_errors, resource_groups
from predictor.cost.loads import ShardLoads
from predictor.errors import InfeasibleError
from predictor.hardware.scaling import is_rate, scale_group
from predictor.hardware.schema import CpuEmbedding, HardwareProfile, ProvenanceKind, weakest
from predictor.iteration.timeline import simulate
from predictor.model.plan import ShardingPlan, TablePlan
from predictor.model.plan_check import match_plan
from predictor.model.topology import Topology
from predictor.model.workload import Workload
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
"""Of the reach, that are scored; the middle one is the profile as it is."""
LEAST = 0.01
"""Gain below which another plan is no reason to measure."""
ALIKE = 1e-3
"""Plans within this share of each other have not changed places."""
CLOSE = 2e-3
"""Share of a factor within which the place of a flip is found."""
MOST_RANKS = 1024
"""On more ranks other methods take seconds."""
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
"""How long that takes, where it is known."""


@dataclass(frozen=True)
class DecidingConstant:
    """A constant whose stated error could make another plan the faster one.

    Args:
        group: of the profile.
        constant: of the group, by which its times are named; the others move along.
        unit: of the constant, in words.
        stated: its value in the profile.
        error: 1-sigma relative error of the group's times, as stated.
        provenance: of the group.
        flips_at: the value from which on the other plan is the faster one.
        below: whether it is so below that value; else above.
        plan: what the other plan is called.
        gain: most of the time in use that the other plan saves within `REACH` stated errors.
        worth: expected share of the iteration that is saved by knowing the value before choosing
            among the plans compared, under the stated error.
        command: what measures the group.
    """

    group: str
    constant: str
    unit: str
    stated: float
    error: float
    provenance: ProvenanceKind
    flips_at: float
    below: bool
    plan: str
    gain: float
    worth: float
    command: str

    @property
    def unmeasured(self) -> bool:
        """Nobody has measured the group on such a device."""
        return self.provenance != "measured"


def deciding_constants(
    problem: Problem, plan: ShardingPlan, others: Mapping[str, ShardingPlan]
) -> list[DecidingConstant]:
    """The constants that decide between a plan and others: those that nobody has measured first,
    and of them what is most worth measuring.

    Args:
        others: name -> plan; those that are the plan itself are left out.

    Raises:
        PlanError: a plan does not cover the problem's tables or ranks.
    """
    rivals = {name: other for name, other in others.items() if other.tables != plan.tables}
    if not rivals:
        return []
    problem = replace(problem, loads=problem.loads or _loads(problem))
    sizes = known_errors(problem.hardware, problem.topology)
    resources = [name for name, size in sizes.items() if size.shared > 0]
    times = _times(problem, [plan, *rivals.values()], resources, sizes)
    found = [
        one
        for row, resource in enumerate(resources)
        for one in _of_group(problem, plan, rivals, resource, sizes[resource], times[:, row])
    ]
    return sorted(found, key=lambda one: (not one.unmeasured, -one.worth, -one.gain, one.below))


def deciding_text(one: DecidingConstant) -> str:
    """What is assumed, what would follow if it is otherwise, and what measures it."""
    side = "below" if one.below else "above"
    return (
        f"The profile assumes {one.stated:.3g} {one.unit} ({KIND_WORDS[one.provenance]}, known to "
        f"within {percent(math.exp(one.error) - 1)}). If it is {side} {one.flips_at:.3g}, "
        f"{plan_words(one.plan)} is faster, by up to {percent(one.gain)}; `{one.command}` measures "
        f"it{SOON.get(one.group, '')}."
    )


def measuring_command(group: str, device: str) -> str:
    """What measures a group: as little as there is a command for.

    Args:
        device: ``cuda`` or ``cpu``, of the profile.
    """
    backend = "" if device == "cpu" else " --backend nccl"
    only = f" --only {MEASURED_ALONE[group]}" if group in MEASURED_ALONE else ""
    return f"shardopt calibrate{backend}{only}"


def plan_words(name: str) -> str:
    """``plan 2`` as it is; a baseline by whose it is."""
    if name.startswith(("plan ", RIVAL)):
        return name
    return "TorchRec's plan" if name == TORCHREC else f"the plan of {name.replace('_', ' ')}"


def usual_plans(problem: Problem) -> dict[str, ShardingPlan]:
    """What other methods choose, where no search has asked them; none on very many ranks."""
    if problem.topology.world_size > MOST_RANKS:
        return {}
    try:
        objective = Objective(problem, whole_space(problem))
    except InfeasibleError:
        return {}
    found = plan_baselines(objective, Surrogate(objective), seed=0)
    return {
        name: objective.sharding_plan(plan) for name, plan in found.items() if name not in INSANE
    }


def _loads(problem: Problem) -> ShardLoads:
    return ShardLoads(problem.workload, problem.topology, problem.hardware)


def known_plans(result: Result) -> dict[str, ShardingPlan]:
    """What a search's best plan is compared with: name -> plan."""
    ranked = {f"plan {i}": r.plan for i, r in enumerate(result.plans[1:], start=2)}
    sane = {name: plan for name, plan in result.baseline_plans.items() if name not in INSANE}
    return {**ranked, **sane}


class _OneByOne(CostErrors):
    """Draws in which one resource after the other takes each of the `STEPS`."""

    def __init__(self, sizes: Mapping[str, ErrorSize], resources: Sequence[str]) -> None:
        super().__init__(sizes, len(resources) * len(STEPS), seed=0)
        self._place = {name: i for i, name in enumerate(resources)}

    def _normal(self, name: str) -> Array:
        found = np.zeros((len(self._place), len(STEPS)))
        if name in self._place:
            found[self._place[name]] = REACH * STEPS
        return found.ravel()


def _times(
    problem: Problem,
    plans: Sequence[ShardingPlan],
    resources: Sequence[str],
    sizes: Mapping[str, ErrorSize],
) -> Array:
    """Iteration times ``[plans, resources, STEPS]``."""
    scorer = problem.scorer
    numbers = [
        [scorer.number(i, table) for i, table in enumerate(_match(problem, plan))] for plan in plans
    ]
    perturbed = problem.perturbed(scorer, _OneByOne(sizes, resources))
    return perturbed.score_numbered(np.array(numbers)).reshape(len(plans), len(resources), -1)


def _of_group(
    problem: Problem,
    plan: ShardingPlan,
    rivals: Mapping[str, ShardingPlan],
    resource: str,
    size: ErrorSize,
    times: Array,
) -> list[DecidingConstant]:
    """What one resource decides below and above its stated value, ``times [plans, STEPS]``."""
    gains = 1 - times[1:] / times[0]
    # what another plan gains as it is stated, no measurement tells
    beyond = gains - np.maximum(0.0, gains[:, len(STEPS) // 2, None])
    chance = np.exp(-((REACH * STEPS) ** 2) / 2)
    worth = float((chance / chance.sum()) @ np.maximum(0.0, beyond.max(axis=0)))
    found = []
    for side in (STEPS < 0, STEPS > 0):
        of = np.where(side, beyond, -math.inf)
        rival, step = (int(i) for i in np.unravel_index(of.argmax(), of.shape))
        if of[rival, step] < LEAST:
            continue
        name = list(rivals)[rival]
        far = math.exp(size.shared * REACH * STEPS[step])
        pair = _Pair(problem, resource, plan, rivals[name])
        gain, stated = pair.gain(far), max(0.0, pair.gain(1.0))
        if gain - stated >= LEAST:
            at = _flip(pair, stated + ALIKE, _bracket(beyond[rival], step, size))
            found.append(_constant(problem, resource, size, at, far, (name, gain, worth)))
    return found


def _bracket(gains: Array, step: int, size: ErrorSize) -> tuple[float, float]:
    """Logs of two factors, by the pass: at the first the other plan is not yet the faster one, at
    the second it is, and so on to ``step``."""
    middle = len(STEPS) // 2
    towards = -1 if step > middle else 1
    beyond = step
    while beyond != middle and gains[beyond] > ALIKE:
        beyond += towards
    logs = size.shared * REACH * STEPS
    return float(logs[beyond]), float(logs[beyond - towards])


@dataclass(frozen=True)
class _Pair:
    """The plan and another one, with the times of one group scaled."""

    problem: Problem
    resource: str
    plan: ShardingPlan
    other: ShardingPlan

    def gain(self, factor: float) -> float:
        """Share of the plan's time that the other one saves, by predictions of both."""
        scaled = self._scaled(factor)
        scorer = scaled.scorer
        ours, theirs = (
            float(simulate(scorer.graph(scorer.totals(_match(scaled, p))[None])).iteration_ms[0])
            for p in (self.plan, self.other)
        )
        return 1 - theirs / ours

    def _scaled(self, factor: float) -> Problem:
        hardware = scale_group(self.problem.hardware, self.resource, factor)
        keeps = self.resource in LOOKUP_FREE
        return replace(self.problem, hardware=hardware, loads=self.problem.loads if keeps else None)


def _flip(pair: _Pair, least: float, bracket: tuple[float, float]) -> float:
    """The factor from which on the other plan is the faster one.

    Args:
        least: gain from which on it is.
        bracket: as `_bracket` gives it.
    """
    near, beyond = bracket
    if near and pair.gain(math.exp(near)) > least:
        near, beyond = 0.0, near  # the pass found it later than predictions do
    while abs(beyond - near) > CLOSE:
        middle = (near + beyond) / 2
        if pair.gain(math.exp(middle)) > least:
            beyond = middle
        else:
            near = middle
    return math.exp(beyond)


def _match(problem: Problem, plan: ShardingPlan) -> Sequence[TablePlan]:
    return match_plan(problem.workload, problem.topology, plan)


def _constant(
    problem: Problem,
    resource: str,
    size: ErrorSize,
    at: float,
    far: float,
    other: tuple[str, float, float],
) -> DecidingConstant:
    constant, unit, stated = named_constant(resource, problem)
    rate = is_rate(constant)
    groups = [problem.hardware.groups[n] for n in resource_groups(resource, problem.topology)]
    name, gain, worth = other
    return DecidingConstant(
        group=resource,
        constant=constant,
        unit=unit,
        stated=stated,
        error=size.shared,
        provenance=weakest(tuple(group.provenance.kind for group in groups)),
        flips_at=stated / at if rate else stated * at,
        below=(far < 1) != rate,
        plan=name,
        gain=gain,
        worth=worth,
        command=measuring_command(resource, problem.hardware.device),
    )


def named_constant(resource: str, problem: Problem) -> tuple[str, str, float]:
    """The constant that stands for a group: its key, its unit in words, and its value."""
    hardware = problem.hardware
    if resource == "gemm":
        return _rate_of_products(problem.workload, hardware)
    if resource == "collectives":
        return _link(hardware, problem.topology)
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


def _rate_of_products(workload: Workload, hardware: HardwareProfile) -> tuple[str, str, float]:
    rates = {str(kind): rate for kind, rate in hardware.gemm.tflops.items()}
    given = str(getattr(workload.dense, "data_type", "fp32"))
    kind = given if given in rates else next(iter(rates))
    return "tflops", f"TFLOP/s in {kind} products", rates[kind]


def _link(hardware: HardwareProfile, topology: Topology) -> tuple[str, str, float]:
    """The line rate between hosts, or what a byte of an all-to-all within one costs."""
    if topology.groups > 1:
        return "nic_gbit_s", "Gbit/s of a NIC", hardware.collectives.inter.nic_gbit_s
    cost = hardware.collectives.intra.all_to_all.us_per_mib[-1]
    return "us_per_mib", "us a MiB of an all-to-all", cost
