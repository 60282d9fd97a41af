"""Steps of a real model and of its generated benchmark, in turns in the same processes.

Run as ``python -m shardopt.replay.side_by_side NAME RANK FOLDER ROUNDS`` by `measure`, one process
a rank; rank 0 writes ``result.json`` into the folder.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from predictor.errors import ShardoptError
from predictor.trace.read import load_traces
from shardopt.bench.realtime import hasten_gloo, hasten_main, keep_freed_memory

WARM_UP = 6
BLOCK = 4
"""Steps that count, after one that finds the caches full of the other's tensors."""
TEARDOWN_S = 0.3
CLASSES = (
    ("collectives", ("c10d::",)),
    ("lookups", ("fbgemm::", "aten::embedding", "aten::_embedding")),
    ("products", ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::matmul")),
    ("convolutions", ("aten::conv", "aten::mkldnn_conv")),
)
"""Class -> how its ops begin; the rest is elementwise and views."""


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Measure one model of `shardopt.replay.originals`.

    Raises:
        ShardoptError: a rank failed; the text is its last words.
    """
    from shardopt.replay.originals import ranks_of

    with tempfile.TemporaryDirectory(prefix="shardopt-mystique-") as place:
        ranks = ranks_of(name)
        processes = []
        for rank in range(ranks):
            environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks)}
            environment |= {"LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
            environment |= {"GLOO_SOCKET_IFNAME": "lo"}
            words = [name, str(rank), place, str(rounds)]
            with (Path(place) / f"log.{rank}").open("wb") as log:
                command = [sys.executable, "-W", "ignore", "-m", __name__, *words]
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        codes = [process.wait() for process in processes]
        if any(codes):
            rank = next(rank for rank, code in enumerate(codes) if code)
            log_text = (Path(place) / f"log.{rank}").read_text(errors="replace")
            raise ShardoptError(f"{name}: rank {rank} failed: {log_text.strip()[-300:]}")
        result: dict[str, Any] = json.loads((Path(place) / "result.json").read_text())
        return {"model": name, "ranks": ranks, **result}


def run(name: str, rank: int, folder: Path, rounds: int) -> None:
    """One rank; collective over all."""
    cores = sorted(os.sched_getaffinity(0))
    ranks = int(os.environ["WORLD_SIZE"])
    os.sched_setaffinity(0, {cores[(rank - ranks) % len(cores)]})
    keep_freed_memory()
    import torch
    import torch.distributed as dist

    from shardopt.replay.originals import original

    torch.set_num_threads(1)
    hasten_main(ranks)
    if ranks > 1:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    step = original(name, rank)
    for _ in range(WARM_UP):
        step()
    _captured(step, folder / "traces", rank)
    if ranks > 1:
        dist.barrier()
    replay = _replay(folder, rank, ranks)
    with torch.no_grad():
        replay.try_ops()
        for _ in range(WARM_UP):
            replay.step()
    gc.collect()
    gc.disable()
    times = _in_turns(step, replay.step, rounds, ranks)
    with torch.no_grad():
        _captured(replay.step, folder / "again", rank)
    if ranks > 1:
        dist.barrier()
    if rank == 0:
        result = {**times, **_shares(folder), "not_replayed": replay.coverage()["reasons"]}
        (folder / "result.json").write_text(json.dumps(result))


def _captured(step: Callable[[], None], folder: Path, rank: int) -> None:
    from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile

    folder.mkdir(exist_ok=True)
    observer = ExecutionTraceObserver().register_callback(str(folder / f"rank{rank}.et.json"))
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, execution_trace_observer=observer
    ) as profiler:
        step()
    profiler.export_chrome_trace(str(folder / f"rank{rank}.kineto.json"))


def _replay(folder: Path, rank: int, ranks: int) -> Any:
    """The generated benchmark, in this process."""
    from shardopt.replay.generate import generate

    place = folder / "benchmark"
    if rank == 0:
        generate([folder / "traces"], place)
    if ranks > 1:
        import torch.distributed as dist

        dist.barrier()
    sys.path.insert(0, str(place))
    sys.argv = [str(place / "benchmark.py")]
    import torch

    runtime = importlib.import_module("runtime.run")
    mine = runtime.own_data()
    program = importlib.import_module(Path(mine["program"]).stem)
    with torch.no_grad():
        if ranks > 1:
            collectives = importlib.import_module("runtime.collectives")
            device = importlib.import_module("runtime.settings").device
            program.ops.collectives = collectives.Collectives(mine["groups"], device)
            program.ops.collectives.start()
        return runtime.Replay(program.ITERATION, program.ops, mine)


def _in_turns(
    step: Callable[[], None], again: Callable[[], None], rounds: int, ranks: int
) -> dict[str, Any]:
    """Medians of blocks, and of the ratios of neighbouring blocks."""
    import torch

    original_ms, replay_ms, ratios = [], [], []
    for at in range(rounds):
        pair: dict[str, float] = {}
        for which in ("original", "replay") if at % 2 else ("replay", "original"):
            if which == "original":
                pair[which] = _block(step, ranks)
            else:
                with torch.no_grad():
                    pair[which] = _block(again, ranks)
        original_ms.append(pair["original"])
        replay_ms.append(pair["replay"])
        ratios.append(pair["replay"] / pair["original"])
    return {
        "original_ms": statistics.median(original_ms),
        "replay_ms": statistics.median(replay_ms),
        "ratio": statistics.median(ratios),
        "original_samples_ms": [round(ms, 4) for ms in original_ms],
        "replay_samples_ms": [round(ms, 4) for ms in replay_ms],
    }


def _block(step: Callable[[], None], ranks: int) -> float:
    if ranks > 1:
        import torch.distributed as dist

        dist.barrier()
        hasten_gloo()
    step()
    spans = []
    for _ in range(BLOCK):
        start = time.perf_counter_ns()
        step()
        spans.append((time.perf_counter_ns() - start) / 1e6)
    return statistics.median(spans)


def _shares(folder: Path) -> dict[str, Any]:
    """Coverage by op time, and times of op classes in both captures of rank 0."""
    from shardopt.replay.annotations import Annotations
    from shardopt.replay.generate import program_of

    classes: dict[str, dict[str, float]] = {}
    coverage = 1.0
    for which, place in (("original", "traces"), ("replay", "again")):
        found = load_traces([folder / place])
        program = program_of(found.executions[0], found, Annotations())
        spent: dict[str, float] = defaultdict(float)
        for call in program.calls:
            spent[class_of(call.op)] += (call.us or 0) / 1e3
        if which == "original":
            lost = sum(item.us or 0 for item in program.left_out) / 1e3
            coverage = sum(spent.values()) / max(sum(spent.values()) + lost, 1e-9)
        for kind, ms in spent.items():
            classes.setdefault(kind, {})[which] = round(ms, 4)
    return {"coverage": coverage, "classes_ms": classes}


def class_of(op: str) -> str:
    """The class of an op, by its name."""
    plain = op.removeprefix("backward of ")
    return next((kind for kind, starts in CLASSES if plain.startswith(starts)), "elementwise")


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Errors of all models: geometric mean and worst of how far replays are off, as fractions."""
    errors = [abs(row["ratio"] - 1) for row in rows]
    return {
        "n": len(rows),
        "mape": statistics.mean(errors),
        "geomean": statistics.geometric_mean(max(error, 1e-4) for error in errors),
        "worst": max(errors),
        "least_coverage": min(row["coverage"] for row in rows),
    }


if __name__ == "__main__":
    model, which_rank, where, count = sys.argv[1:]
    run(model, int(which_rank), Path(where), int(count))
    time.sleep(TEARDOWN_S)
    # gloo's threads may abort an orderly end
    os._exit(0)
