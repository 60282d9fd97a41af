"""Answers of the commands: every field is a key of ``--json``, and its description the reference.

Console, page, tables and scripts draw these objects and nothing else. Fields that are excluded from
JSON are what a drawing needs beside the keys. Names carry the unit: ``_ms``, ``_bytes``; a share or
a gain is a fraction of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from predictor.iteration.critical_path import Segment
from predictor.iteration.ranges import OutOfRange
from predictor.model.memory.ranks import RankMemory, missing
from predictor.model.plan import ShardingPlan
from predictor.model.plan_json import plan_to_dict
from predictor.predict import Prediction, RankLoad
from search.constraint_costs import ConstraintCost, ConstraintCosts
from search.expected_gain import ExpectedGain
from search.in_use.price import Move
from search.problem import Result, TieSummary
from search.tune.advice import Advised, NotTried, OtherMachine
from search.tune.trial import TRIED
from shardopt.api.json_object import JsonObject, Object, Opaque, drawn, key
from shardopt.api.setting import Setting
from shardopt.explain.changes import Changes
from shardopt.explain.deciding import DecidingConstant
from shardopt.explain.host import HostBound
from shardopt.explain.networks import NetworkPart
from shardopt.explain.waits import Wait
from shardopt.explain.whatif import WhatIf
from shardopt.race import Confirmation


def _tables(plan: Any) -> Any:
    return plan_to_dict(plan)["tables"] if isinstance(plan, ShardingPlan) else plan


Tables = Annotated[Object, BeforeValidator(_tables)]
"""``tables`` of plan.json."""


class Facts(JsonObject):
    """Model, machine and ranks that an answer is for."""

    model: dict[str, str] = key("``name`` and ``sha256`` of the model file's contents.")
    hardware: str = key("Name or path of the profile.")
    world_size: int = key("Ranks that plans cover: all, or those of a sharding group.")
    local_world_size: int = key("Ranks of a host.")
    batch_size: int = key("Samples per rank and iteration.")
    network: Object | None = key("``kind`` and ``per_gpu_gbps``, where it was named.", default=None)
    replica_groups: Object | None = key("2D parallelism, where there is some.", default=None)
    setting: Opaque[Setting] = drawn()


# --- advice and constraints ---------------------------------------------------------------------


class Change(JsonObject):
    """Settings outside the plan, with the predicted time under them."""

    iteration_ms: float
    gain: float = key("Share of the time per sample that goes.")
    costs: list[str] = key("Costs beside time, in words.")
    same_plan: bool = key("False: the time is that of another plan, in ``tables``.")
    tables: Tables | None = key("As in plan.json.", default=None)
    labels: tuple[str, ...] = drawn()

    @property
    def label(self) -> str:
        """``index_dedup: true on t_item``; the first of several."""
        return self.labels[0]

    @model_validator(mode="before")
    @classmethod
    def _of_advice(cls, advice: Any) -> Any:
        steps = getattr(advice, "steps", ())
        if not steps:
            return advice
        names, targets, values = zip(*((s.name, s.target, s.value) for s in steps), strict=True)
        several = {"names": names, "targets": targets, "values": values}
        tables = {} if advice.same_plan else {"tables": advice.plan}
        labels = [step.label for step in steps]
        return {**vars(steps[0]), **vars(advice), **several, **tables, "labels": labels}


Value = bool | int | float | str


class SingleChange(Change):
    """One setting."""

    name: str = key("Setting, as the model file has it where it does.")
    target: str | None = key("Table; null for the whole model.")
    value: Value
    how: str = key("Change to make, and where.")


class JointChange(Change):
    """Several settings together."""

    names: list[str]
    targets: list[str | None]
    values: list[Value]


class Considered(JsonObject):
    """Settings that were looked at."""

    tried: int = key("Number of settings that were predicted.")
    not_tried: list[NotTried] = key("Others: ``name`` and ``why``.")


class AdviceKeys(JsonObject):
    """Advice on settings outside the plan."""

    advice: list[SingleChange] = key("Single settings, best first.")
    together: JointChange | None = key("Several of them, where that gains more.")
    advice_considered: Considered | None = key("Null where no advice was asked for.")
    other_machines: list[OtherMachine] = key(
        "``name`` (``gpus`` or ``network``, in times of its rate), ``value``, ``iteration_ms`` of "
        "the plan placed again, ``gain`` (of the whole job) and ``gpu_time`` (of a sample, as a "
        "multiple)."
    )


def advice_keys(advised: Advised | None) -> Object:
    """Keys of `AdviceKeys`."""
    shown = advised or Advised()
    return {
        "advice": shown.advice,
        "together": shown.together,
        "advice_considered": advised,
        "other_machines": shown.machines,
    }


class Unconstrained(JsonObject):
    """Best plan without constraints."""

    iteration_ms: float
    plan: Object = key("As in plan.json.")
    gain: float = drawn()


class ConstraintPrices(JsonObject):
    """Cost of the constraints of the model file."""

    constraint_costs: list[ConstraintCost] = key(
        "Constraints that bind, in the order in which dropping them saves most: ``table`` (null "
        "for all that are left together), ``constraint``, ``iteration_ms_without`` (dropped as "
        "well as those before it) and ``gain``."
    )
    unconstrained: Unconstrained | None = key("Null where constraints cost nothing.")


def constraint_keys(costs: ConstraintCosts | None) -> Object:
    """Keys of `ConstraintPrices`."""
    if costs is None:
        return {"constraint_costs": [], "unconstrained": None}
    free = {**vars(costs), "plan": plan_to_dict(costs.plan)}
    return {"constraint_costs": costs.costs, "unconstrained": free}


# --- predictions --------------------------------------------------------------------------------


class RankUse(JsonObject):
    """Memory of one rank."""

    rank: int
    hbm_bytes: int = key("Shards in device memory, with what is in flight between them.")
    hbm_cap_bytes: int = key("Device memory as installed; on CPUs what is left for shards.")
    ddr_bytes: int = key("Shards in host memory.")
    ddr_cap_bytes: int = key("Host memory left for shards.")
    activations_bytes: int = key("Most of the dense part beside what stays, with lookups' outputs.")
    limit_bytes: int = key("Installed memory less the reserve and the contexts of CUDA and NCCL.")
    peak_allocated_bytes: int = key("Tensors that are there at once.")
    peak_reserved_bytes: int = key("Memory that the allocator takes for them.")
    fits: bool
    capacity_bytes: int = drawn()
    on_device: bool = drawn()
    missing_bytes: int = drawn()
    lacks: str = drawn()

    @model_validator(mode="before")
    @classmethod
    def _of_rank(cls, rank: Any) -> Any:
        if not isinstance(rank, RankMemory):
            return rank
        peak = rank.peak
        assert peak is not None
        return {
            **vars(rank),
            **vars(peak),
            **({"hbm_cap_bytes": peak.capacity_bytes} if peak.on_device else {}),
            "peak_allocated_bytes": peak.allocated_bytes,
            "peak_reserved_bytes": peak.reserved_bytes,
            "fits": rank.fits,
            "missing_bytes": rank.missing_hbm_bytes + rank.missing_ddr_bytes,
            "lacks": missing([rank]),
        }


class ReplicaSyncTimes(JsonObject):
    """Averaging of the tables that every sharding group has a copy of."""

    weight_bytes: tuple[int, ...] = key("Weights that a rank of a group averages, rank by rank.")
    state_bytes: tuple[int, ...] = key("Optimizer states that it averages.")
    sync_ms: float = key("Time of one averaging.")
    step_ms: float = key("Iteration with it.")
    within_step: bool = drawn()


class Headline(JsonObject):
    """The predicted time and what it rests on."""

    iteration_ms: float = key("Steady-state period of the training loop.")
    interval_ms: tuple[float, float] = key("Low and high, 90 %.")
    interval_calibrated: bool = key("Measured iterations show how much such intervals hold.")
    provenance: str = key("Weakest provenance of the constants on the critical path.")
    out_of_range: list[OutOfRange] = key(
        "Costs beyond the rows behind the profile: ``group``, ``profile`` (what gives the group), "
        "``quantity``, ``asked``, and ``low`` and ``high``, which the rows cover."
    )


class PredictedPlan(Headline):
    """One plan with its prediction."""

    breakdown: dict[str, float] = key(
        "Phase -> ms on the critical path; the parts sum to ``iteration_ms``."
    )
    per_rank: list[RankLoad] = key(
        "``rank``, ``busy_ms`` (phase -> its own kernels and transfers, which overlap) and "
        "``idle_ms`` (of its compute stream)."
    )
    memory: list[RankUse]
    dense_ops_by_bytes: dict[str, int] = key(
        "Ops of the dense part without a kernel model -> calls; priced by the bytes they touch."
    )
    dense_by_module: dict[str, tuple[float, float]] = key(
        "Part of a captured module -> device time in ms of its forward and backward."
    )
    replica_sync: ReplicaSyncTimes | None = key("Null where no table is copied.")
    prediction: Opaque[Prediction] = drawn()
    sharding_plan: Opaque[ShardingPlan] = drawn()

    @classmethod
    def of(cls, sharding: ShardingPlan, prediction: Prediction, /, **keys: Any) -> Self:
        """A plan, its prediction and the further keys of this class."""
        own = {"prediction": prediction, "sharding_plan": sharding}
        return cls.model_validate({**vars(prediction), **own, **keys})


class GivenPlan(PredictedPlan):
    """A plan out of a file."""

    plan: str = key("Path as given.")
    doubts: tuple[str, ...] = drawn(default=())
    bound_ms: float | None = drawn(default=None)
    constraints: ConstraintPrices | None = drawn(default=None)


class FoundPlan(PredictedPlan):
    """A plan that a search found."""

    found_by: str = key("Method that found it.")
    tables: Tables = key("As in plan.json.")


class PredictAnswer(Facts):
    """``shardopt predict``."""

    predictions: list[GivenPlan] = key("In the order given.")


# --- shardopt plan ------------------------------------------------------------------------------


class FoundTime(JsonObject):
    """Time of a plan that another is preferred to."""

    iteration_ms: float
    found_by: str


class ScenarioAnswer(JsonObject):
    """Best plan in a scenario."""

    name: str
    weight: float
    iteration_ms: float = key("Best plan in this scenario.", "ours_ms")
    best_known_ms: float = key("Best plan known of this scenario.", "best_ms")
    lower_bound_ms: Annotated[float | None, BeforeValidator(lambda ms: ms or None)] = key(
        "Null where none was computed.", "bound_ms"
    )


class InUse(JsonObject):
    """The plan of ``--from``."""

    plan: str = key("Path as given.")
    iteration_ms: float = key("Predicted time of the plan in use.")
    misfits: list[str] = key("Reasons why it cannot stay as it is.")
    max_moves: int | None = key("Tables that could move; null for all.")
    max_bytes: float | None = key("Bytes that could move; null for any number.")
    horizon: int | None = key("Steps over which a move had to pay for itself.")
    moved: list[str] = key("Tables that differ in the best plan.")
    moved_bytes: int = key("Weights and optimizer state that reach a rank that did not hold them.")
    sharding_plan: Opaque[ShardingPlan] = drawn()


class MoveAnswer(JsonObject):
    """The move from the plan in use to the best plan."""

    bytes: int = key("As ``moved_bytes``.")
    link_bytes: dict[str, int] = key("The same by link.")
    seconds: float = key("Time that the job stands still, in s.")
    both_copies_bytes: int = key("Tables on the rank that has most to hold meanwhile.")
    in_place: bool = key("TorchRec can make this move while the job runs.")
    pays_back_after_steps: float | None = key("Null where the plan in use is as fast.")
    recommended: bool = key("There is a move, and it pays or the plan in use cannot stay.")
    lower_bound_gain: float = key("No plan within the limits gains more of the time in use.")


def move_keys(result: Result, move: Move | None, path: object) -> Object:
    """``from`` and ``move`` of ``shardopt plan --json``; nothing without a plan in use."""
    in_use = result.in_use
    if in_use is None or move is None:
        return {}
    moved = {"moved": move.tables, "moved_bytes": move.bytes, "sharding_plan": in_use.plan}
    return {
        "from": InUse.model_validate({**vars(in_use), "plan": str(path), **moved}),
        "move": MoveAnswer.model_validate(
            {
                **vars(move),
                "bytes": move.bytes,
                "pays_back_after_steps": move.pays_back_after(
                    in_use.iteration_ms, result.best.iteration_ms
                ),
                "recommended": bool(move.tables),
                "lower_bound_gain": max(0.0, 1 - result.lower_bound_ms / in_use.iteration_ms),
            }
        ),
    }


class MeasuredPlan(JsonObject):
    """A plan that ran for real."""

    plan: str = key("Its name in the report.", "name")
    found_by: str
    median_ms: float | None
    interval_ms: tuple[float, float] | None = key("95 %.")
    dropped_after: int | None = key("Rounds after which it was out; null if it stayed.")
    predicted_ms: float | None
    factor: float | None = key("Measured over predicted time, where outside its interval.")


def confirmation_keys(confirmation: Confirmation | None) -> Object:
    """``confirmed`` and ``measured_gain``; neither where nothing was measured."""
    if confirmation is None:
        return {"confirmation": None}
    gain = confirmation.gain
    named = gain and dict(zip(("value", "low", "high"), gain, strict=True))
    shown = {"confirmed": confirmation.plans, "measured_gain": named}
    return {"confirmation": confirmation, **shown}


class PlanHead(Facts):
    """Head of a plan file."""

    device: str = key("``cuda`` or ``cpu``.")
    seed: int
    versions: dict[str, str] = key("Package -> version.")
    made_by: Object | None = key("All that makes the plan, for ``--replay``.", default=None)
    tuned: Object | None = key("Setting that ``--tune`` chose.", default=None)


class AdviceAnswer(AdviceKeys, PlanHead):
    """``shardopt plan --advice-only``."""

    iteration_ms: float = key("Plan that settings are priced at.")
    found_by: str


class PlanAnswer(ConstraintPrices, AdviceKeys, Headline, PlanHead):
    """``shardopt plan``; its time is that of the best plan."""

    lower_bound_ms: float = key("No plan of the search space is predicted to be faster.")
    gap: float | None = key("``iteration_ms / lower_bound_ms - 1``; null where the bound is 0.")
    bound_notes: list[str] = key("Gaps that the bound leaves, in words; empty if it is closed.")
    surrogate_gap: None = key("Null; older readers ask for it.")
    stopped_by: str = key("``work``, ``gap``, ``time`` or ``interrupted``.")
    search_seconds: float = key("Wall time of the search in s.")
    evaluations: int = key("Plans scored on the full timeline.")
    plans: list[FoundPlan] = key("Best first.")
    baselines: dict[str, float] = key("Other method -> ms of its plan under the same predictor.")
    expected_gain: ExpectedGain | None = key(
        "Best plan over TorchRec's, a share of the iteration: ``baseline`` (as in ``baselines``), "
        "``mean``, ``interval`` (90 %), ``nominal`` (every cost as predicted) and ``draws``; null "
        "where TorchRec's planner has no plan."
    )
    sharding_matters: bool = key("False where sane plans are alike.")
    verdict: str = key("Recommendation, the first line of the console.")
    host_bound: HostBound | None = key("``share`` (of the critical path), ``why``, ``remedy``.")
    preferred_to: FoundTime | None = key("Fastest plan found, where another is preferred to it.")
    objective: str = key("``nominal``, ``mean`` or ``regret``.")
    ties: TieSummary | None = key(
        "``plans`` (within ``tolerance`` of the best), ``host_bound``, ``device_ms`` (best plan, "
        "if the host took no time), ``device_range_ms`` (least and most of these plans), "
        "``decided_by``, ``fullest_bytes`` (shards on the fullest rank) and ``expected_ms`` (mean "
        "over draws of the costs' errors), both of the best plan and of the fastest."
    )
    scenarios: list[ScenarioAnswer] = key("Times of the best plan if costs or data differ.")
    worst_regret: float | None = key("Largest ``iteration_ms / best_known_ms - 1``.")
    proved_regret: float | None = key("The same with the bounds; null where one is missing.")
    passed_over: float | None = key(
        "Largest regret, or mean in ms, of a plan that is better by the objective, but that errors "
        "could not tell from the best plan."
    )
    notes: list[str] = key("Notes of the console.")
    from_: InUse | None = Field(default=None, alias="from", description="The plan of ``--from``.")
    move: MoveAnswer | None = key("The move from it.", default=None)
    deciding: list[DecidingConstant] = key("Constants that decide, the most important first.")
    between_hosts: NetworkPart | None = key(
        "Null where NICs join no ranks, or ``stage`` (the longest that a slower network prolongs), "
        "``stage_ms`` and ``others`` (kind -> iteration_ms over it; empty where it was named)."
    )
    confirmed: list[MeasuredPlan] | None = key("Plans that ran for real.", default=None)
    measured_gain: dict[str, float | None] | None = key(
        "Gain over TorchRec's plan: ``value``, ``low``, ``high``; null where that was not timed.",
        default=None,
    )
    confirmation: Opaque[Confirmation] | None = drawn()
    torchrecs: Opaque[ShardingPlan] | None = drawn()

    @property
    def best(self) -> FoundPlan:
        """The best plan."""
        return self.plans[0]

    @property
    def lever(self) -> SingleChange | None:
        """Best change besides the plan, if it gains more than the plan itself."""
        gained = 0.0 if self.expected_gain is None else self.expected_gain.mean
        return next((entry for entry in self.advice[:1] if entry.gain > gained), None)


class TuneTrial(JsonObject):
    """A setting that was looked at."""

    number: int
    setting: dict[str, Value]
    state: str = key(
        "``searched``, ``ruled out``, ``infeasible``, ``failed``, or ``open``: its worker runs it "
        "or died."
    )
    iteration_ms: float | None
    reason: str | None
    objectives: dict[str, float] | None = key("Null unless searched.")
    bound: dict[str, float] | None = key("No plan of the setting has smaller objectives.")
    as_given: bool = drawn()


class TuneMember(JsonObject):
    """A setting that no other beats."""

    number: int
    setting: dict[str, Value]
    changes: list[str] = key("Changes to make, in words.")
    objectives: dict[str, float]
    iteration_ms: float
    lower_bound_ms: float
    undone: dict[str, float] = key(
        "Parameter -> fraction by which the first objective grows when it alone is undone."
    )
    tables: Tables = key("As in plan.json.")


class TuneKeys(JsonObject):
    """Trials of ``--tune``."""

    objectives: dict[str, str] = key("Name -> unit, in the order given.")
    values: dict[str, list[Value]] = key("Parameter -> the values it could take.")
    settings: int = key("Number of combinations.")
    trials: list[TuneTrial] = key("By number.")
    best: TuneMember = key("First of ``front``.")
    front: list[TuneMember] = key("Best by the first objective first.")
    stopped_by: str = key("``trials``, ``exhausted``, ``time`` or ``interrupted``.")
    study: str | None = key("Its name in the storage.")

    @property
    def goal(self) -> str:
        """The first objective."""
        return next(iter(self.objectives))

    @property
    def choices(self) -> list[str]:
        """Parameters that had a choice."""
        return [name for name, values in self.values.items() if len(values) > 1]

    @property
    def tried(self) -> int:
        """Settings that were searched, ruled out or found to have no plan."""
        return sum(trial.state in TRIED for trial in self.trials)

    @property
    def as_given(self) -> TuneTrial | None:
        """The trial of the case as given, if it was searched."""
        given = (trial for trial in self.trials if trial.as_given and trial.objectives is not None)
        return next(given, None)


class TuneAnswer(PlanAnswer):
    """``shardopt plan --tune``: the plan of the best setting, and how that was found."""

    tune: TuneKeys


class MachineAnswer(JsonObject):
    """Best plan on one of several machines; keys of a plan are null where none fits."""

    hardware: str
    gpus: int
    iteration_ms: float | None
    interval_ms: tuple[float, float] | None
    gap: float | None
    samples_per_s: float | None = key("Samples per second of all ranks.")
    samples_per_s_per_gpu: float | None
    hbm_bytes: int | None = key("Memory that the fullest rank reserves at its peak.")
    bound_by: str | None = key("Part that takes most of the iteration.")
    price_per_million_samples: float | None = key("In the currency of the prices.")
    tables: Tables | None = key("As in plan.json.")
    advice: list[SingleChange] | None = key("This and the next five as of ``shardopt plan``.")
    together: JointChange | None
    advice_considered: Considered | None
    other_machines: list[OtherMachine] | None
    constraint_costs: list[ConstraintCost] | None
    unconstrained: Unconstrained | None
    no_plan: str | None = key("Reason why none fits; null where one does.")
    plan: PlanAnswer | None = drawn()


class MachinesAnswer(JsonObject):
    """``shardopt plan`` with several machines."""

    machines: list[MachineAnswer] = key("In the order given.")
    files: list[str] = key("Plan files that were written.")


# --- shardopt explain ---------------------------------------------------------------------------


class PathSegment(JsonObject):
    """A stretch of a critical path."""

    name: str
    phase: str
    resource: str = key("Group of the profile that prices it.")
    rank: int
    start_ms: float = key("From the start of the path.")
    duration_ms: float

    @property
    def end_ms(self) -> float:
        """End, from the start of the path."""
        return self.start_ms + self.duration_ms


def path_keys(path: Sequence[Segment]) -> list[PathSegment]:
    """Segments of a critical path, whose times count from its start."""
    origin = path[0].start_ms if path else 0.0
    return [
        PathSegment.model_validate(
            {**vars(s), "start_ms": s.start_ms - origin, "duration_ms": s.duration_ms}
        )
        for s in path
    ]


class PlanChangeAnswer(JsonObject):
    """A change of the plan that saves time."""

    change: str = key("In words.")
    tables: Tables = key("New sharding of the tables that change, as in plan.json.")
    iteration_ms: float
    saving_ms: float


def changes_keys(plan: ShardingPlan, changes: Changes) -> Object:
    """Keys of `ChangesAnswer`."""
    found = [
        {**vars(change), "change": change.words, "tables": replace(plan, tables=change.tables)}
        for change in changes.helpful
    ]
    return {"tried": changes.tried, "none_words": changes.none_words, "found": found}


class ChangesAnswer(JsonObject):
    """Changes of the plan that were tried."""

    tried: int
    found: list[PlanChangeAnswer] = key(
        "At most three that share no table, the most helpful first."
    )
    none_words: str = drawn()


class ExplainAnswer(AdviceKeys, GivenPlan, Facts):
    """``shardopt explain``."""

    lower_bound_ms: float | None = key(
        "No plan is predicted to be faster, as the search proved that wrote the plan; null where "
        "that was for another model or machine."
    )
    critical_path: list[PathSegment] = key("In order of time.")
    host_work: dict[str, float] = key(
        "Phase -> ms that the busiest host takes to issue its work; the fixed time of an iteration "
        "counts with the optimizer."
    )
    waits: list[Wait] = key(
        "On the critical path, the longest first: ``collective``, ``phase``, ``rank``, "
        "``late_rank``, ``wait_ms``, ``median_ms``, ``waiting`` (ranks), ``words``, ``causes`` "
        "(``name``, ``phase``, ``late_ms``, ``excess_ms``, ``tables``: key -> share, ``more`` that "
        "are not named)."
    )
    changes: ChangesAnswer
    memory_notes: list[str] = key("Reasons for tables in host memory, and waste of their caches.")
    sensitivity: list[WhatIf] = key("``kind``, ``change``, ``iteration_ms`` and ``change_ms``.")
    deciding: list[DecidingConstant] = key("Constants that decide, the most important first.")
    others: list[GivenPlan] = key("Further plans.")
    table_times: dict[str, tuple[float, float]] = drawn()
    critical_groups: frozenset[str] = drawn()

    @property
    def plans(self) -> list[GivenPlan]:
        """The plan explained, then the others."""
        return [self, *self.others]
