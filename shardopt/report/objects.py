"""What ``--json`` prints and plan files hold, as plain dicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from predictor.model.memory.ranks import RankMemory
from predictor.model.plan import ShardingPlan
from predictor.model.plan_json import plan_to_dict
from predictor.predict import Prediction
from search.scenarios.scored import REGRET
from shardopt.api.answer import Answer, move_object
from shardopt.explain.deciding import DecidingConstant
from shardopt.formatting import gap_of
from shardopt.report.advice import advice_object

Object = dict[str, Any]
SYNC = ("weight_bytes", "state_bytes", "sync_ms", "step_ms")


def prediction_object(prediction: Prediction) -> Object:
    """One prediction.

    Keys:
        iteration_ms: steady-state period of the training loop.
        interval_ms: ``[low, high]``, 90 %.
        breakdown: phase -> ms on the critical path; the parts sum to ``iteration_ms``.
        per_rank: a list of ``rank``, ``busy_ms`` (phase -> ms of the rank's own kernels and
            transfers, which overlap) and ``idle_ms`` (of its compute stream).
        memory: `memory_objects`.
        provenance: the weakest of the constants on the critical path.
        out_of_range: what the profile was asked beyond the rows behind it: ``group``,
            ``profile`` (what gives the group), ``quantity``, ``asked``, and ``low`` and ``high``,
            which the rows behind the group cover.
        dense_ops_by_bytes: ops of the dense part without a kernel model -> calls; priced by the
            bytes that they touch.
        dense_by_module: part of a captured module -> device time in ms of its forward and backward.
        replica_sync: null where no table is copied, or ``weight_bytes`` and ``state_bytes`` that
            every rank of a sharding group averages with its copies, ``sync_ms`` of one averaging
            and ``step_ms`` of an iteration with it.
    """
    sync = prediction.replica_sync
    return {
        "iteration_ms": prediction.iteration_ms,
        "interval_ms": list(prediction.interval_ms),
        "breakdown": dict(prediction.breakdown),
        "per_rank": [
            {"rank": r.rank, "busy_ms": dict(r.busy_ms), "idle_ms": r.idle_ms}
            for r in prediction.per_rank
        ],
        "memory": memory_objects(prediction.memory),
        "provenance": prediction.provenance,
        "out_of_range": [asdict(item) for item in prediction.out_of_range],
        "dense_ops_by_bytes": dict(prediction.dense_ops_by_bytes),
        "dense_by_module": {k: list(v) for k, v in prediction.dense_by_module.items()},
        "replica_sync": sync and {name: getattr(sync, name) for name in SYNC},
    }


def memory_objects(memory: Iterable[RankMemory]) -> list[Object]:
    """``memory`` of ``--json``, a rank each.

    Keys:
        hbm_bytes, ddr_bytes: of the rank's shards, with what is in flight for them.
        hbm_cap_bytes: of the device, as installed.
        ddr_cap_bytes: of host memory, left for shards.
        activations_bytes: most of the dense part beside what stays.
        peak_allocated_bytes, peak_reserved_bytes: most of the whole process, in tensors and as the
            allocator takes it; of host memory on CPUs.
        limit_bytes: of the capacity, what may be reserved.
        fits: the peak is within that, and host memory suffices.
    """
    found = []
    for rank in memory:
        peak = rank.peak
        assert peak is not None
        found.append(
            {
                "rank": rank.rank,
                "hbm_bytes": rank.hbm_bytes,
                "hbm_cap_bytes": peak.capacity_bytes if peak.on_device else rank.hbm_cap_bytes,
                "ddr_bytes": rank.ddr_bytes,
                "ddr_cap_bytes": rank.ddr_cap_bytes,
                "activations_bytes": peak.activations_bytes,
                "peak_allocated_bytes": peak.allocated_bytes,
                "peak_reserved_bytes": peak.reserved_bytes,
                "limit_bytes": peak.limit_bytes,
                "fits": rank.fits,
            }
        )
    return found


def plan_object(answer: Answer, in_use: Path | None = None) -> Object:
    """``shardopt plan --json``.

    Args:
        in_use: path of the plan in use, as given.

    Keys, in addition to those of ``answer.head``, which come first:
        iteration_ms, interval_ms, provenance, out_of_range: of the best plan.
        lower_bound_ms: no plan of the search space is predicted to be faster.
        gap: ``iteration_ms / lower_bound_ms - 1``, a fraction; null where the bound is 0.
        bound_notes: what the bound leaves out or did not get to, a sentence each; empty where it
            is closed.
        surrogate_gap: null; older readers ask for it.
        stopped_by: ``work``, ``gap``, ``time`` or ``interrupted``.
        search_seconds: wall time of the search.
        evaluations: plans scored on the full timeline.
        plans: best first, each with the keys of `prediction_object`, ``found_by`` and ``tables``
            as in plan.json.
        baselines: name -> iteration_ms under the same predictor.
        expected_gain: of the best plan over TorchRec's, a share of the iteration: ``baseline``
            (whose plan, as in ``baselines``), ``mean``, ``interval`` (90 %), ``nominal`` (if every
            cost were as predicted) and ``draws``; null where TorchRec's planner has no plan.
        sharding_matters: false where sane plans are alike.
        verdict: what to do, the first line of the console.
        advice, together, other_machines: `advice_object`.
        preferred_to: the fastest plan found, as ``iteration_ms`` and ``found_by``, where another
            is preferred to it; else null.
        objective: ``nominal``, ``mean`` or ``regret``.
        ties: null, or ``plans`` (within ``tolerance`` of the best), ``host_bound``, ``device_ms``
            (of the best plan, if the host took no time), ``device_range_ms`` (least and most of
            these plans), ``decided_by`` and ``fullest_bytes`` (of shards on the fullest rank, of
            the best plan and of the fastest).
        scenarios: each with ``name``, ``weight``, ``iteration_ms`` (of the best plan),
            ``best_known_ms`` and ``lower_bound_ms`` (null where none was computed).
        worst_regret: the largest ``iteration_ms / best_known_ms - 1``; null without scenarios.
        proved_regret: the same with the bounds; null where one is missing.
        passed_over: the largest regret, or the mean in ms, of a plan that is better by the
            objective, but that errors could not tell from the best plan; null where there is none.
        notes: what the console says once.
        from, move: `move_object`, with a plan in use.
        deciding: `deciding_object`.
    """
    result, best, fastest = answer.result, answer.best, answer.result.fastest
    passed_over = result.passed_over
    if passed_over is not None and result.aim == REGRET:
        passed_over -= 1
    return {
        **answer.head,
        "iteration_ms": best.iteration_ms,
        "interval_ms": list(best.interval_ms),
        "provenance": best.provenance,
        "out_of_range": [asdict(item) for item in best.out_of_range],
        "lower_bound_ms": result.lower_bound_ms,
        "gap": gap_of(best.iteration_ms, result.lower_bound_ms),
        "bound_notes": list(result.bound_notes),
        "surrogate_gap": None,
        "stopped_by": result.stopped_by,
        "search_seconds": result.search_seconds,
        "evaluations": result.evaluations,
        "plans": [
            {
                **prediction_object(prediction),
                "found_by": ranked.found_by,
                "tables": tables_object(ranked.plan),
            }
            for ranked, prediction in zip(result.plans, answer.predictions, strict=True)
        ],
        "baselines": dict(result.baselines),
        "expected_gain": None if answer.gain is None else asdict(answer.gain),
        "sharding_matters": answer.stakes is None or answer.stakes.matters,
        "verdict": answer.verdict,
        **advice_object(answer.advised),
        "preferred_to": fastest
        and {"iteration_ms": fastest.iteration_ms, "found_by": fastest.found_by},
        "objective": result.aim,
        "ties": None if result.ties is None else asdict(result.ties),
        "scenarios": [
            {
                "name": one.name,
                "weight": one.weight,
                "iteration_ms": one.ours_ms,
                "best_known_ms": one.best_ms,
                "lower_bound_ms": one.bound_ms or None,
            }
            for one in result.scenarios
        ],
        "worst_regret": result.worst_regret,
        "proved_regret": result.proved_regret,
        "passed_over": passed_over,
        "notes": list(answer.setting.notes),
        **move_object(result, answer.move, in_use),
        "deciding": deciding_object(answer.deciding),
    }


def deciding_object(found: Sequence[DecidingConstant]) -> list[Object]:
    """``deciding`` of ``plan`` and ``explain --json``, the most important first.

    Keys:
        constant: ``group.key`` in the profile; the other constants of the group move along.
        value: as the profile states it.
        flips_at: from which on another plan is the faster one, below it or above it (``side``).
        gain: most of the time in use that this plan saves within two stated errors, a fraction.
        plan: which one.
        group, unit, rel_error, provenance: of the constant and its group.
        worth: share of the iteration that knowing the value is expected to save.
        command: measures the group.
    """
    return [
        {
            "constant": f"{one.group}.{one.constant}",
            "value": one.stated,
            "flips_at": one.flips_at,
            "side": "below" if one.below else "above",
            "gain": one.gain,
            "plan": one.plan,
            "group": one.group,
            "unit": one.unit,
            "rel_error": one.error,
            "provenance": one.provenance,
            "worth": one.worth,
            "command": one.command,
        }
        for one in found
    ]


def tables_object(plan: ShardingPlan) -> Object:
    """``tables`` of plan.json."""
    tables: Object = plan_to_dict(plan)["tables"]
    return tables


def predict_object(predictions: Sequence[tuple[str, Prediction]], setting: Object) -> Object:
    """``shardopt predict --json``.

    Keys:
        predictions: in the order given: ``plan`` (the path as given) and the keys of
            `prediction_object`.
        model, hardware, world_size, local_world_size, batch_size: what they were made for.
    """
    return {
        **setting,
        "predictions": [
            {"plan": name, **prediction_object(prediction)} for name, prediction in predictions
        ],
    }
