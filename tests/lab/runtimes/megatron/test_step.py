"""Iteration times of GPTs: what each constant and each way of splitting does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.runtimes.megatron import (
    CONSTANTS,
    GptTraining,
    MegatronRuntime,
    MegatronStep,
    load_megatron,
    misalignment,
    segment_kernels,
)
from predictor.hardware.loader import load_hardware

A100 = load_hardware("a100-80gb")
RUNTIME = MegatronRuntime(50.0, 1.5, 1.5, 2.0, 1.5, 15.0)
MODEL = GptTraining(
    hidden=1024, heads=16, layers=8, sequence=512, vocabulary=50304,
    micro_batch=2, global_batch=16, tensor=1, data=1, pipeline=1,
)  # fmt: skip


def iteration_ms(model: GptTraining, runtime: MegatronRuntime = RUNTIME) -> float:
    return float(MegatronStep(A100, runtime).iteration_ms([model])[0])


def test_a_slow_host_sets_the_pace_of_every_segment() -> None:
    host = replace(RUNTIME, kernel_us=50_000.0)
    times = MegatronStep(A100, host).segments_ms(MODEL)
    for name, kernels in segment_kernels(MODEL).items():
        assert times[name] == pytest.approx(50.0 * len(kernels), rel=0.01)


def test_a_fast_host_leaves_the_kernels() -> None:
    step = MegatronStep(A100, replace(RUNTIME, kernel_us=1e-6))
    times = step.segments_ms(MODEL)
    for name, kernels in segment_kernels(MODEL).items():
        assert times[name] == pytest.approx(sum(map(step.kernel_ms, kernels)))


def test_the_host_waits_for_every_all_reduce() -> None:
    model = replace(MODEL, tensor=2)
    host = replace(RUNTIME, kernel_us=50_000.0)
    step = MegatronStep(A100, host)
    kernels = segment_kernels(model)["layer_forward"]
    reduced = [step.tensor_ms(model, k) for k in kernels if k.kind == "all_reduce"]
    launches = 50.0 * (len(kernels) - len(reduced))
    assert min(reduced) > 0
    found = step.segments_ms(model)["layer_forward"]
    assert found == pytest.approx(launches + sum(reduced), rel=0.01)


@settings(max_examples=20, deadline=None)
@given(
    tensor=st.sampled_from([1, 2, 4]),
    data=st.sampled_from([1, 2]),
    pipeline=st.sampled_from([1, 2, 4]),
)
def test_more_work_takes_longer_however_it_is_split(tensor: int, data: int, pipeline: int) -> None:
    model = replace(MODEL, tensor=tensor, data=data, pipeline=pipeline)
    more = [
        model,
        replace(model, layers=16),
        replace(model, global_batch=32),
        replace(model, recompute=True),
        replace(model, sequence=1024),
        replace(model, vocabulary=2 * MODEL.vocabulary),
    ]
    times = MegatronStep(A100, RUNTIME).iteration_ms(more)
    assert (times[1:] > times[0]).all()


@pytest.mark.parametrize("name", CONSTANTS)
def test_every_constant_counts(name: str) -> None:
    model = replace(MODEL, pipeline=2, vocabulary=50257)
    if name == "eager_factor":  # Megatron's softmax takes heads in fours
        model = replace(model, heads=1, micro_batch=1)
    changed = replace(RUNTIME, **{name: 2 * getattr(RUNTIME, name)})
    slower = iteration_ms(model, changed) > iteration_ms(model)
    assert slower is (name != "send_gb_s")


def test_many_at_once_are_each_as_alone() -> None:
    models = [
        MODEL,
        replace(MODEL, pipeline=4),
        replace(MODEL, tensor=2, data=2),
        replace(MODEL, pipeline=4, micro_batch=1),
        replace(MODEL, global_batch=8),
    ]
    together = MegatronStep(A100, RUNTIME).iteration_ms(models)
    assert together == pytest.approx(np.array([iteration_ms(model) for model in models]))


def test_replicas_add_the_reduction_of_their_gradients() -> None:
    step = MegatronStep(A100, RUNTIME)
    two = replace(MODEL, data=2, global_batch=32)
    alone, both = step.iteration_ms([MODEL, two])
    assert step.reduce_ms(MODEL) == 0.0
    assert both - alone == pytest.approx(step.reduce_ms(two))
    far = MegatronStep(A100, RUNTIME, gpus_per_node=1)
    assert far.reduce_ms(two) > step.reduce_ms(two)


def test_shares_of_an_iteration() -> None:
    """A slow host leaves kernels next to nothing, a fast one waits for nothing."""
    slow, fast = (
        MegatronStep(A100, replace(RUNTIME, kernel_us=us)).shares(MODEL) for us in (5e4, 1e-6)
    )
    for found in (slow, fast):
        assert sum(found.values()) == pytest.approx(1.0)
    assert slow["overheads"] > 0.99
    assert fast["overheads"] == pytest.approx(0.0, abs=1e-6)
    assert fast["collectives"] == 0.0
    split = MegatronStep(A100, RUNTIME).shares(replace(MODEL, tensor=2, data=2))
    assert split["collectives"] > 0


def test_misalignment_halves_the_load_step_by_step() -> None:
    shapes = [(8, 16, 64), (8, 12, 64), (8, 6, 64), (8, 16, 50257)]
    assert [misalignment(shape) for shape in shapes] == [0, 1, 2, 3]


def test_the_shipped_runtime_names_a_profile_and_its_rows() -> None:
    found = load_megatron()
    assert load_hardware(found.hardware).name == found.hardware
    assert all(getattr(found.runtime, name) > 0 for name in CONSTANTS)
    assert len(found.rows) == 100
    assert {len(row) for row in found.rows} == {10}
