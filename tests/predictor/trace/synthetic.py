"""Small traces whose every figure is known: what the tests of `predictor.trace` read.

One step lasts 1000 µs. From its start: a matrix product is launched at 20-30 and runs 50-250 on
stream 7; an all-reduce of 4000 bytes is launched at 120-130 and runs 150-450 on stream 20; a copy
runs 450-470; an addition is launched at 600-610 and runs 620-720.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from predictor.trace.events import RankTrace
from predictor.trace.read import load_traces

Event = dict[str, Any]

STEP_US = 1000
COMPUTE_MS = 0.3
EXPOSED_MS = 0.2
HIDDEN_MS = 0.1
MEMCPY_MS = 0.02
HOST_BOUND_MS = 0.45
IDLE_MS = 0.03

RECENT, OLD, OLDEST = "2024", "2023", "2021"
"""Years of different schemas."""
CATEGORIES = {
    OLDEST: {
        "cpu_op": "Operator",
        "user_annotation": "Operator",
        "cuda_runtime": "Runtime",
        "kernel": "Kernel",
        "gpu_memcpy": "Memcpy",
    }
}
COMM_ARGS = {
    "Collective name": "allreduce",
    "In msg nelems": 1000,
    "Out msg nelems": 1000,
    "Group size": 2,
    "dtype": "Float",
    "In split size": "[]",
    "Out split size": "[]",
    "Process Group Name": "0",
    "Process Group Ranks": "[0, 1]",
}


def kineto(
    rank: int = 0,
    *,
    steps: int = 2,
    world_size: int = 2,
    schema: str = RECENT,
    start_us: float = 1_000_000,
    markers: bool = True,
) -> dict[str, Any]:
    """A Kineto document."""
    events: list[Event] = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}},
        {"ph": "X", "cat": "Trace", "name": "Profiler", "pid": "Spans", "tid": "x", "ts": 0},
    ]
    for step in range(steps):
        events += _step(step, start_us + STEP_US * step, schema, markers)
    document: dict[str, Any] = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "Some GPU"}],
        "traceEvents": events,
        "traceName": "x.json",
    }
    if schema != OLDEST:
        document["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world_size}
    return document


def _step(step: int, start: float, schema: str, markers: bool) -> list[Event]:
    correlation = 100 * step
    number = 1000 * step

    def host(name: str, at: int, length: int, kind: str = "cpu_op", **args: Any) -> Event:
        nonlocal number
        number += 1
        ids: dict[str, Any] = {"External id" if schema != OLDEST else "external id": number}
        if schema == RECENT:
            ids["Record function id"] = number - 500 * step
        event_args = {key.replace("_", " "): value for key, value in args.items()}
        return _event(kind, name, 1, 1, start + at, length, {**ids, **event_args}, schema)

    def launch(name: str, at: int, offset: int) -> Event:
        args = {"correlation": correlation + offset}
        return _event("cuda_runtime", name, 1, 1, start + at, 10, args, schema)

    def device(name: str, at: int, length: int, offset: int, **args: Any) -> Event:
        stream = args.pop("stream", 7)
        kind = args.pop("kind", "kernel")
        event_args = {"correlation": correlation + offset, "stream": stream, "device": 0, **args}
        return _event(kind, name, 0, stream, start + at, length, event_args, schema)

    floats = {"Input_Dims": [[10, 10], [10, 10]], "Input_type": ["float", "float"]}
    vector = {"Input_Dims": [[1000]], "Input_type": ["float"]}
    comm = COMM_ARGS if schema == RECENT else {}
    name = f"ProfilerStep#{step + 3}"
    marker = host(name, 0, STEP_US - 1, "user_annotation")
    events = [
        host("aten::mm", 10, 50, **floats),
        launch("cudaLaunchKernel", 20, 1),
        device("void mm_kernel<float>(int)", 50, 200, 1),
        host("c10d::allreduce_", 100, 80),
        host("record_param_comms", 110, 60, **comm),
        host("nccl:all_reduce", 115, 50, "user_annotation", **vector),
        launch("cudaLaunchKernelExC", 120, 2),
        device("ncclKernel_AllReduce_RING_LL_Sum_float(x)", 150, 300, 2, stream=20, **comm),
        launch("cudaMemcpyAsync", 300, 3),
        device("Memcpy DtoH", 450, 20, 3, kind="gpu_memcpy", bytes=64),
        host("aten::add", 590, 30, **floats),
        launch("cudaLaunchKernel", 600, 4),
        device("void add_kernel<float>(int)", 620, 100, 4),
    ]
    return [marker, *events] if markers else events


def _event(
    kind: str, name: str, pid: int, tid: int, start: float, length: float, args: Event, schema: str
) -> Event:
    return {
        "ph": "X",
        "cat": CATEGORIES.get(schema, {}).get(kind, kind),
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start + 0.25 if schema == RECENT and isinstance(start, float) else start,
        "dur": length,
        "args": args,
    }


def execution(rank: int = 0, *, nested: bool = False) -> dict[str, Any]:
    """An execution trace of one step; ``nested``: in the layout since 1.0.2-chakra.0.0.4."""
    square = [[5, 6, 0, 100, 4, f"cuda:{rank}"], [10, 10], "Tensor(float)"]
    line = [[[7, 8, 0, 1000, 4, f"cuda:{rank}"]], [[1000]], "GenericList[Tensor(float)]"]
    words = [[n, [], "Int"] for n in (41, 9000, rank)]
    comm = [line, *words, ["allreduce", [], "String"]]
    splits = [[[], [], "GenericList[]"], [[], [], "GenericList[]"]]
    nodes = [
        _node(3, 2, "aten::mm", 2, [square, square], [square], nested, "aten::mm(Tensor a)"),
        _node(6, 5, "nccl:all_reduce", 5, [[line[0][0], [1000], "Tensor(float)"]], [], nested),
        _node(5, 4, "record_param_comms", 4, [*comm, *splits], [line], nested),
        _node(4, 2, "c10d::allreduce_", 3, [line], [], nested, "c10d::allreduce_(Tensor[] t)"),
        _node(7, 2, "aten::add", 6, [square, square], [square], nested, "aten::add(Tensor a)"),
        _node(2, 1, "[pytorch|profiler|execution_trace|thread]", 0, [], [], nested),
        _node(1, 1, "[pytorch|profiler|execution_trace|process]", 0, [], [], nested),
    ]
    schema = "1.1.0-chakra.0.0.4" if nested else "1.0.1"
    return {"schema": schema, "pid": 1, "nodes": nodes, "finish_ts": 2}


def _node(
    number: int,
    parent: int,
    name: str,
    record: int,
    inputs: list[list[Any]],
    outputs: list[list[Any]],
    nested: bool,
    schema: str = "",
) -> dict[str, Any]:
    thread = 0 if number == 1 else 1
    attributes = {"rf_id": record, "seq_id": -1, "scope": 0, "tid": thread, "op_schema": schema}
    sides = {"input": _columns(inputs), "output": _columns(outputs)}
    if not nested:
        flat = {
            f"{side}{ending}": columns[i]
            for side, columns in sides.items()
            for i, ending in enumerate(("s", "_shapes", "_types"))
        }
        return {"name": name, "id": number, "parent": parent, "fw_parent": 0, **attributes, **flat}
    return {
        "id": number,
        "name": name,
        "ctrl_deps": parent,
        **{
            f"{side}s": dict(zip(("values", "shapes", "types"), columns, strict=True))
            for side, columns in sides.items()
        },
        "attrs": [{"name": key, "type": "x", "value": value} for key, value in attributes.items()],
    }


def _columns(arguments: list[list[Any]]) -> list[list[Any]]:
    return [[argument[i] for argument in arguments] for i in range(3)]


def write(folder: Path, name: str, document: object) -> Path:
    """Write JSON, gzipped if the name says so."""
    path = folder / name
    content = json.dumps(document).encode()
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


def read_kineto(path: Path) -> RankTrace:
    """The trace of the only rank in a file."""
    (trace,) = load_traces([path]).traces
    return trace
