"""The measured form of a dense part out of traces whose every figure is known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from predictor.errors import InputError
from predictor.trace.events import (
    CollectiveCall,
    DeviceEvent,
    HostEvent,
    MemoryEvent,
    RankTrace,
    TraceStep,
)
from predictor.trace.phases import traced_dense

NODE = "autograd::engine::evaluate_function: "
MAIN, GLOO = 1, 9


def op(name: str, start: float, length: float, **fields: Any) -> HostEvent:
    kind = fields.pop("kind", "annotation" if name.startswith(("[", "##", "Opt")) else "op")
    thread = fields.pop("thread", MAIN)
    return HostEvent(name, kind, thread, start, start + length, **fields)


def step(at: float, scale: float = 1.0) -> list[HostEvent]:
    """Forward 0-300 of which 50-150 are lookups, backward 300-700 of which 500-600 are theirs."""
    events = [
        op("ProfilerStep#1", 0, 1000),
        op("## copy_batch_to_gpu ##", 0, 10),
        op("aten::linear", 20, 30, sequence=1, shapes=((512, 13), (64, 13)), dtypes=("float",) * 2),
        op("[lookup]_[sparse.ebc]_[table_wise]", 50, 50, sequence=None),
        op("fbgemm::split_embedding_codegen_lookup", 60, 30, sequence=2),
        op("## EmbeddingBagCollectionAwaitable wait() ##", 100, 50),
        op("aten::view", 110, 10, sequence=3),
        op("aten::index_select", 120, 10, sequence=3),
        op("aten::to", 160, 1, sequence=4),
        op("aten::mse_loss", 170, 100, sequence=4, shapes=((512, 1), (512, 1))),
        op(NODE + "MseLossBackward0", 300, 100, sequence=4),
        op(NODE + "IndexSelectBackward0", 500, 50, sequence=3),
        op(NODE + "CppNode<SplitLookupFunction_Op>", 550, 50, sequence=2),
        op(NODE + "AddmmBackward0", 600, 100, sequence=1),
        op("c10d::allreduce_", 650, 20),
        op("gloo:all_reduce", 660, 200, thread=GLOO, shapes=((1000,),), dtypes=("float",)),
        op("Optimizer.step#Adam.step", 800, 50),
        op("aten::_foreach_add_", 810, 30),
    ]
    moved = [
        replace(e, start_us=at + scale * e.start_us, end_us=at + scale * e.end_us) for e in events
    ]
    return [replace(e, sequence=e.sequence and int(e.sequence + at)) for e in moved]


def trace(*steps: list[HostEvent], **fields: Any) -> RankTrace:
    host = tuple(sorted((e for s in steps for e in s), key=lambda e: (e.start_us, -e.end_us)))
    marks = [e for e in host if e.name.startswith("ProfilerStep")]
    return RankTrace(
        source="t.json",
        rank=0,
        world_size=2,
        device_name=None,
        host=host,
        device=fields.pop("device", ()),
        steps=tuple(TraceStep(e.name, e.start_us, e.end_us) for e in marks),
        **fields,
    )


def test_on_the_host_time_of_the_main_thread_counts_without_embedding_modules() -> None:
    traced = traced_dense([trace(step(0), step(1000, 1.0), step(2000, 1.0))])
    dense, measured = traced.dense, traced.dense.measured
    assert traced.steps == 3
    # 20-300 without 50-150; 300-700 without 500-600 and the all-reduce's start
    assert measured.forward_ms == pytest.approx(0.180)
    assert measured.backward_ms == pytest.approx(0.280)
    assert measured.optimizer_ms == pytest.approx(0.050)
    assert dense.gradient_bytes == 4000
    assert (measured.batch_size, dense.optimizer) == (512, "adam")
    assert dense.activation_bytes is None
    assert any("profile_memory=True" in note for note in traced.notes)


def test_on_a_device_kernels_count_by_what_launched_them() -> None:
    host = step(0)
    kernels = []
    for number, (at, start, length) in enumerate(
        [(25, 100, 40), (65, 140, 500), (180, 640, 60), (310, 700, 80), (560, 780, 900)]
    ):
        host.append(op("cudaLaunchKernel", at, 2, kind="runtime", correlation=number))
        kernels.append(DeviceEvent(f"k{number}", "kernel", 7, start, start + length, number))
    host.append(op("cudaLaunchKernel", 655, 2, kind="runtime", correlation=9))
    call = CollectiveCall("all_reduce", 4096, None, 0)
    kernels.append(DeviceEvent("nccl", "kernel", 8, 900, 990, 9, collective=call))
    host.append(op("cudaMemcpyAsync", 172, 2, kind="runtime", correlation=10))
    kernels.append(DeviceEvent("Memcpy HtoD", "memcpy", 7, 650, 660, 10))
    host.append(op("cudaLaunchKernel", 815, 2, kind="runtime", correlation=11))
    kernels.append(DeviceEvent("adam", "kernel", 7, 990, 995, 11))
    dense = traced_dense([trace(host, device=tuple(kernels))]).dense
    measured = dense.measured
    assert measured.forward_ms == pytest.approx(0.100)
    assert measured.backward_ms == pytest.approx(0.080)
    assert measured.optimizer_ms == pytest.approx(0.005)
    assert dense.gradient_bytes == 4096


def test_activations_are_what_dense_ops_of_the_forward_hold() -> None:
    memory = (
        MemoryEvent(MAIN, 5.0, 10_000, 1),  # the batch
        MemoryEvent(MAIN, 30.0, 1_000, 2),
        MemoryEvent(MAIN, 70.0, 50_000, 3),  # in a lookup
        MemoryEvent(MAIN, 180.0, 2_000, 4),
        MemoryEvent(MAIN, 190.0, 500, 5),
        MemoryEvent(MAIN, 200.0, -500, 5),
        MemoryEvent(MAIN, 210.0, -50_000, 3),
        MemoryEvent(MAIN, 350.0, 90_000, 6),  # in the backward
    )
    assert traced_dense([trace(step(0), memory=memory)]).dense.activation_bytes == 3_500


def test_a_step_without_a_backward_says_what_to_record() -> None:
    forward = [e for e in step(0) if e.start_us < 300]
    with pytest.raises(InputError, match="record training steps"):
        traced_dense([trace(forward)])
