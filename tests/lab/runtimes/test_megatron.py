"""Iteration times of GPTs: what each constant and each way of splitting does."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.runtimes.megatron import (
    CONSTANTS,
    SEGMENTS,
    GptTraining,
    Kernel,
    MegatronRuntime,
    MegatronStep,
    load_megatron,
    pipeline_ms,
    schedule,
    segment_kernels,
)
from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.iteration.graph import COMPUTE, Graph
from predictor.iteration.timeline import simulate_once

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
        assert times[name] == pytest.approx(sum(step.kernel_ms(k, MODEL) for k in kernels))


def test_the_host_waits_for_every_all_reduce() -> None:
    model = replace(MODEL, tensor=2)
    host = replace(RUNTIME, kernel_us=50_000.0)
    step = MegatronStep(A100, host)
    kernels = segment_kernels(model)["layer_forward"]
    reduced = [step.kernel_ms(k, model) for k in kernels if k.kind == "all_reduce"]
    launches = 50.0 * (len(kernels) - len(reduced))
    assert min(reduced) > 0
    segment = step.segments_ms(model)["layer_forward"]
    assert segment == pytest.approx(launches + sum(reduced), rel=0.01)


@pytest.mark.parametrize("name", CONSTANTS)
def test_every_constant_counts(name: str) -> None:
    model = replace(MODEL, pipeline=2, vocabulary=50257)
    if name == "eager_factor":  # Megatron's softmax takes heads in fours
        model = replace(model, heads=1, micro_batch=1)
    changed = replace(RUNTIME, **{name: 2 * getattr(RUNTIME, name)})
    slower = iteration_ms(model, changed) > iteration_ms(model)
    assert slower is (name != "send_gb_s")


def test_replicas_add_the_reduction_of_their_gradients() -> None:
    step = MegatronStep(A100, RUNTIME)
    two = replace(MODEL, data=2, global_batch=32)
    alone, both = step.iteration_ms([MODEL, two])
    assert step.reduce_ms(MODEL) == 0.0
    assert both - alone == pytest.approx(step.reduce_ms(two))
    far = MegatronStep(A100, RUNTIME, gpus_per_node=1)
    assert far.reduce_ms(two) > step.reduce_ms(two)


def test_the_shipped_runtime_names_a_profile_and_its_rows() -> None:
    runtime = load_megatron()
    assert load_hardware(runtime.hardware).name == runtime.hardware
    assert all(getattr(runtime.runtime, name) > 0 for name in CONSTANTS)
    assert len(runtime.rows) == 100
    assert {len(row) for row in runtime.rows} == {10}


SMALL_MODEL = GptTraining(
    hidden=1024, heads=16, layers=24, sequence=512, vocabulary=50257,
    micro_batch=4, global_batch=64, tensor=1, data=2, pipeline=2,
)  # fmt: skip


def flops(kernels: Iterable[Kernel]) -> float:
    return sum(2.0 * k.count * k.shape[0] * k.shape[1] * k.shape[2] for k in kernels)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"heads": 15}, "hidden size 1024 is not a multiple of 15"),
        ({"tensor": 32}, "attention heads 16"),
        ({"pipeline": 5}, "layers 24"),
        ({"micro_batch": 5}, "global batch 64 is not a multiple of 10"),
    ],
)
def test_what_does_not_divide_is_refused(changes: dict[str, int], text: str) -> None:
    with pytest.raises(InputError, match=text):
        replace(SMALL_MODEL, **changes)  # type: ignore[arg-type]


@given(
    tensor=st.sampled_from([1, 2, 4, 8, 16]),
    micro=st.sampled_from([1, 2, 4, 8]),
    sequence=st.sampled_from([256, 512, 1024]),
)
def test_a_layer_multiplies_as_often_as_the_literature_counts(
    tensor: int, micro: int, sequence: int
) -> None:
    """24 b s h^2 + 4 b s^2 h forward, twice that backward (Narayanan et al. 2021, appendix)."""
    model = replace(SMALL_MODEL, tensor=tensor, micro_batch=micro, sequence=sequence)
    parts = segment_kernels(model)
    tokens, h = micro * sequence, model.hidden
    expected = (24 * tokens * h**2 + 4 * tokens * sequence * h) / tensor
    assert flops(parts["layer_forward"]) == pytest.approx(expected)
    assert flops(parts["layer_backward"]) == pytest.approx(2 * expected)
    head = 2 * tokens * h * model.local_vocabulary
    assert flops(parts["head_forward"]) == pytest.approx(head)
    assert flops(parts["head_backward"]) == pytest.approx(2 * head)


def test_recomputing_repeats_the_forward_pass_before_the_backward_pass() -> None:
    plain, again = (
        segment_kernels(SMALL_MODEL),
        segment_kernels(replace(SMALL_MODEL, recompute=True)),
    )
    assert again["layer_backward"] == plain["layer_forward"] + plain["layer_backward"]
    assert all(again[name] == plain[name] for name in SEGMENTS if name != "layer_backward")


def test_tensor_parallel_ranks_reduce_twice_each_way() -> None:
    parts = segment_kernels(replace(SMALL_MODEL, tensor=2))
    for name in ("layer_forward", "layer_backward"):
        reduced = [k for k in parts[name] if k.kind == "all_reduce"]
        assert [k.bytes_moved for k in reduced] == [SMALL_MODEL.hidden_bytes] * 2
    assert not [k for k in segment_kernels(SMALL_MODEL)["layer_forward"] if k.kind == "all_reduce"]


def test_the_fused_softmax_needs_a_multiple_of_four() -> None:
    """Two heads a GPU and one sample: PyTorch's own kernels run, in fp32."""
    few = segment_kernels(replace(SMALL_MODEL, tensor=8, micro_batch=1))
    enough = segment_kernels(replace(SMALL_MODEL, tensor=8, micro_batch=2))
    for name, more in (("layer_forward", 5), ("layer_backward", 6)):
        assert not [k for k in few[name] if k.kind == "softmax"]
        assert len([k for k in enough[name] if k.kind == "softmax"]) == 1
        assert len(few[name]) == len(enough[name]) + more


TIMES = st.floats(0.0, 10.0)


def on_the_timeline(
    forward: list[float], backward: list[float], send: float, micro_batches: int
) -> float:
    """One rank a stage; what a stage hands over is met by the next on a link of its own."""
    stages = len(forward)
    graph = Graph(stages, stages)
    arrived: dict[tuple[int, bool, int], int] = {}
    for stage, is_backward, index in schedule(stages, micro_batches):
        step = -1 if is_backward else 1
        source = arrived.get((stage - step, is_backward, index))
        there = 0 <= stage + step < stages
        cost = (backward if is_backward else forward)[stage] + (send if there else 0.0)
        names = {"phase": "pass", "resource": "gemm"}
        ran = graph.add("pass", stream=COMPUTE, cost_ms=cost, ranks=(stage,),
                        deps=[] if source is None else [source], **names)  # fmt: skip
        if there:
            both = (min(stage, stage + step), max(stage, stage + step))
            arrived[stage, is_backward, index] = graph.add(
                "handed over", stream=f"link {stage} {is_backward}", cost_ms=0.0, deps=[ran],
                ranks=both, scope=both, **names,
            )  # fmt: skip
    return float(simulate_once(graph).iteration_ms[0])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), stages=st.integers(1, 4), micro_batches=st.integers(1, 7), send=TIMES)
def test_it_equals_the_timeline(
    data: st.DataObject, stages: int, micro_batches: int, send: float
) -> None:
    each = st.lists(TIMES, min_size=stages, max_size=stages)
    forward, backward = data.draw(each), data.draw(each)
    total_ms = float(pipeline_ms(forward, backward, send, micro_batches))
    assert total_ms == pytest.approx(on_the_timeline(forward, backward, send, micro_batches))


@given(stages=st.integers(1, 6), micro_batches=st.integers(1, 12))
def test_every_pass_runs_once_after_what_it_waits_for(stages: int, micro_batches: int) -> None:
    order = schedule(stages, micro_batches)
    position = {step: i for i, step in enumerate(order)}
    assert len(position) == len(order) == 2 * stages * micro_batches
    for stage, is_backward, index in order:
        before = [(stage + 1, True, index)] if is_backward else [(stage - 1, False, index)]
        if is_backward:
            before.append((stage, False, index))
        for step in before:
            assert step not in position or position[step] < position[stage, is_backward, index]


@given(stages=st.integers(1, 6), micro_batches=st.integers(1, 12), f=TIMES, b=TIMES)
def test_equal_stages_leave_the_known_bubble(
    stages: int, micro_batches: int, f: float, b: float
) -> None:
    """(m + p - 1) (f + b): Narayanan et al. 2021, section 2.2.1."""
    total_ms = pipeline_ms([f] * stages, [b] * stages, 0.0, micro_batches)
    assert float(total_ms) == pytest.approx((micro_batches + stages - 1) * (f + b))
