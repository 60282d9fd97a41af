"""The machine's speed changes between calibration and task: a profile scaled by reference kernels.

The same fixed kernels (`shardopt.measure.reference`) run during calibration and in every round of a
bench run. No iteration of the model enters the ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from predictor.errors import InputError
from predictor.hardware.schema import (
    CollectiveGroups,
    CpuEmbedding,
    Curve,
    Group,
    HardwareProfile,
    StrictModel,
)
from shardopt.calibrate.points import REFERENCE_KERNELS as KERNELS

FACTORS = ("backward_stateless", "backward_weighted")
"""Fields of the embedding model that are no times."""
SMALL_MOVES = (
    *("floor_us", "ramp_us", "bucketize_ns_per_id", "gather_ns_per_element"),
    *("math_ns_per_element", "random_ns_per_element", "sliced_ns_per_element"),
    "turned_ns_per_element",
)
Ratios = Mapping[str, float]
"""Reference kernel -> its time in the task over its time in the calibration."""


def drift_ratios(task: Mapping[str, float], calibration: Mapping[str, float]) -> dict[str, float]:
    """`Ratios` of two sets of reference times."""
    return {kernel: task[kernel] / calibration[kernel] for kernel in KERNELS}


def correct_drift(profile: HardwareProfile, ratios: Ratios) -> HardwareProfile:
    """The profile of the machine while the task ran.

    Embedding constants follow their lookups, collectives the all-to-all, all else the GEMM: it
    alone of the references depends on the core's clock and on nothing else.

    Args:
        profile: of CPU ranks.
    """
    clock = ratios["gemm"]
    gemm, memory = profile.gemm, profile.memory
    groups = {
        "embedding": _embedding(profile, ratios),
        "gemm": gemm.model_copy(
            update={
                "tflops": {kind: rate / clock for kind, rate in gemm.tflops.items()},
                **_scaled(gemm, ("floor_us", "batched_us"), clock),
                "batches": {
                    layout: tuple(ns * clock for ns in costs)
                    for layout, costs in gemm.batches.items()
                },
                "attention_head_us": tuple(us * clock for us in gemm.attention_head_us),
            }
        ),
        "memory": memory.model_copy(
            update={
                **_scaled(memory, ("hbm_gb_s", "l2_gb_s", "host_link_gb_s", "ddr_gb_s"), 1 / clock),
                **_scaled(memory, ("host_link_latency_us",), clock),
            }
        ),
        "elementwise": profile.elementwise.model_copy(
            update=_scaled(profile.elementwise, SMALL_MOVES, clock)
            | {"math_ns": _slower_each(profile.elementwise.math_ns, clock)}
        ),
        "overheads": profile.overheads.model_copy(
            update=_scaled(profile.overheads, _us_fields(profile.overheads), clock)
            | {"step_us": _slower_each(profile.overheads.step_us, clock)}
        ),
        "collectives": with_curves(profile, lambda curve: _slower(curve, ratios["all_to_all"])),
    }
    return profile.model_copy(update=groups)


def with_curves(profile: HardwareProfile, change: Callable[[Curve], Curve]) -> CollectiveGroups:
    """The profile's collectives with every curve of every link changed."""
    links = {}
    for name in ("intra", "inter"):
        link = getattr(profile.collectives, name)
        curves = {key: value for key, value in link if isinstance(value, Curve)}
        changed = {key: change(curve) for key, curve in curves.items()}
        links[name] = link.model_copy(update=changed)
    return profile.collectives.model_copy(update=links)


def _embedding(profile: HardwareProfile, ratios: Ratios) -> CpuEmbedding:
    model = profile.embedding
    if not isinstance(model, CpuEmbedding):
        raise InputError(f"{profile.name}: drift is corrected in profiles of CPU ranks only")
    forward = [name for name, _ in model if name.startswith("forward_")]
    backward = [name for name, _ in model if name.startswith("backward_") and name not in FACTORS]
    return model.model_copy(
        update={
            **_scaled(model, forward, ratios["lookup_forward"]),
            **_scaled(model, backward, ratios["lookup_backward"]),
        }
    )


def _us_fields(group: Group) -> list[str]:
    return [name for name, value in group if name.endswith("_us") and isinstance(value, float)]


def _slower_each(costs: Mapping[str, float], factor: float) -> dict[str, float]:
    return {name: cost * factor for name, cost in costs.items()}


def _scaled(group: StrictModel, names: Sequence[str], factor: float) -> dict[str, float]:
    return {name: getattr(group, name) * factor for name in names}


def _slower(curve: Curve, factor: float) -> Curve:
    return curve.model_copy(
        update={
            **_scaled(curve, ("latency_us", "latency_per_doubling_us"), factor),
            "us_per_mib": tuple(cost * factor for cost in curve.us_per_mib),
        }
    )
