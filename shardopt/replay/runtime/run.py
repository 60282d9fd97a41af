"""Runs a generated benchmark: makes its tensors, times iterations, says what ran."""

from __future__ import annotations

import importlib
import json
import os
import statistics
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .collectives import Collectives
from .ops import Op, Ops
from .settings import COMMS, HOME, data, device, rank, selected, settings
from .tensors import like, make_all

TEARDOWN_S = 0.3
"""gloo's threads may abort a process that ends right after its last collective."""


class Replay:
    """One rank of a benchmark."""

    def __init__(self, iteration: Sequence[Any], ops: Ops, mine: dict[str, Any]) -> None:
        self.ops, self.mine = ops, mine
        self.calls = mine["calls"]
        self.parts = [part for part in zip(iteration, mine["parts"], strict=True) if _wanted(part)]
        if not self.parts:
            names = sorted({name for names, _ in iteration for name in names})
            raise SystemExit(
                f"--from-annotation {settings.from_annotation!r}: no part has this name; there "
                f"are: {', '.join(names)}"
            )
        self.ran = [at for _, (start, end) in self.parts for at in range(start, end)]
        self.indices = settings.indices or data["indices"]
        self.template = make_all(
            mine["made"], mine["tensors"], device, self.indices, settings.seed + rank
        )
        self._complete()
        self._prepare()

    def _complete(self) -> None:
        """A part alone reads tensors that parts before it would have given."""
        specs: dict[int, Any] = {}
        for call in self.calls:
            for number, spec in zip(call.get("gives", ()), _flat(call), strict=False):
                specs.setdefault(number, spec)
        given: set[int] = set()
        for at in self.ran:
            for number in self.calls[at].get("reads", ()):
                if self.template[number] is None and number not in given and number in specs:
                    self.template[number] = like(specs[number], device)
            given.update(self.calls[at].get("gives", ()))

    def _prepare(self) -> None:
        of: dict[tuple[str, str], list[int]] = defaultdict(list)
        for at in self.ran:
            of[self.calls[at]["op"], self.calls[at].get("overload", "")].append(at)
        for key, op in self.ops.named.items():
            op.calls = of.get(key, [])
            op.recorded = [self.calls[at].get("outputs") for at in op.calls]
            op.skipped = not selected(op.name)

    def step(self) -> None:
        """One iteration."""
        t, c = list(self.template), self.mine["c"]
        work: list[Any] = []
        if self.ops.collectives is not None:
            self.ops.collectives.begin()
        for op in self.ops.named.values():
            op.at = 0
        # values are not the trace's: where they fade away, products would be slow for nothing
        torch.set_flush_denormal(True)
        for (_, part), _ in self.parts:
            part(t, c, work)
        torch.set_flush_denormal(False)

    def try_ops(self) -> None:
        """The first iteration: find out what can run, and bind it."""
        self.step()
        if settings.last_op is not None:
            settings.last_op.write_text("")
        if self.ops.collectives is not None:
            self.ops.collectives.agreed = True
        for (_, part), _ in self.parts:
            names = part.__globals__
            for name, value in list(names.items()):
                if isinstance(value, Op):
                    names[name] = value.settled()

    def coverage(self) -> dict[str, Any]:
        """Which ops of the trace ran, by count and by their recorded time."""
        counted = [at for at in self.ran if self._counts(at)]
        failed = {
            op.calls[at]: (op.name, why)
            for op in self.ops.named.values()
            for at, why in op.reasons.items()
            if at < len(op.calls)
        }
        left_out = self.mine["left_out"] if settings.from_annotation is None else []
        times = [self.calls[at].get("us") for at in counted]
        total_us = sum(us or 0 for us in times) + sum(item["us"] or 0 for item in left_out)
        ran = [at for at in counted if at not in failed]
        reasons: dict[str, int] = defaultdict(int)
        for name, why in failed.values():
            reasons[f"{name}: {why}"] += 1
        for item in left_out:
            reasons[f"{item['op']}: {item['reason']}"] += 1
        return {
            "total": len(counted) + len(left_out),
            "replayed": len(ran),
            "us": sum(self.calls[at].get("us") or 0 for at in ran),
            "total_us": total_us,
            "reasons": dict(reasons),
        }

    def _counts(self, at: int) -> bool:
        call = self.calls[at]
        return selected(f"{call['op']}.{call.get('overload', '')}")


def _wanted(part: Any) -> bool:
    (names, _), _ = part
    return settings.from_annotation is None or settings.from_annotation in names


def _flat(call: dict[str, Any]) -> list[Any]:
    """Specs of the outputs that have a number, in order; as many as can be told."""
    found: list[Any] = []
    for spec in call.get("outputs", ()):
        if spec is not None and not isinstance(spec[-1], str):
            found.extend(spec)
        else:
            found.append(spec)
    return found


def _now() -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _profiled(replay: Replay, folder: Path) -> None:
    """Capture an iteration: an execution trace and a Kineto trace a rank."""
    from torch.profiler import ExecutionTraceObserver, ProfilerActivity, profile

    folder.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    observer = ExecutionTraceObserver().register_callback(str(folder / f"rank{rank}.et.json"))
    with profile(
        activities=activities, record_shapes=True, execution_trace_observer=observer
    ) as profiler:
        replay.step()
    profiler.export_chrome_trace(str(folder / f"rank{rank}.kineto.json"))


def own_data() -> dict[str, Any]:
    """What this rank runs: its own recording, or another's if there is none."""
    recorded = data["ranks"]
    at = recorded.index(rank) if rank in recorded else rank % len(recorded)
    return json.loads((HOME / f"rank{at}.json").read_text(encoding="utf-8"))


def _gathered(mine: dict[str, Any], together: bool) -> list[dict[str, Any]]:
    if not together:
        return [mine]
    import torch.distributed as dist

    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


def main(iteration: Sequence[Any], ops: Ops) -> None:
    """Try, warm up, time, profile, and report on rank 0."""
    torch.set_num_threads(settings.threads)
    # of names that newer versions of torch deprecate; the older ones have no others
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*an autograd kernel was not registered")
    mine = own_data()
    if Path(sys.argv[0]).name != mine["program"]:
        program = importlib.import_module(Path(mine["program"]).stem)
        iteration, ops = program.ITERATION, program.ops
    has_comms = any(call["op"].startswith(COMMS) for call in mine["calls"])
    together = has_comms or int(os.environ.get("WORLD_SIZE", "1")) > 1
    with torch.no_grad():
        if together:
            ops.collectives = Collectives(mine["groups"], device)
            ops.collectives.start()
        result = run(Replay(iteration, ops, mine), together)
    if rank == 0:
        text = json.dumps(result, indent=1)
        print(text) if settings.result is None else settings.result.write_text(text)
    sys.stdout.flush()
    if together:
        time.sleep(TEARDOWN_S)
        os._exit(0)


def run(replay: Replay, together: bool) -> dict[str, Any]:
    """Times of iterations and what ran, of all ranks."""
    replay.try_ops()
    mine = replay.coverage()
    if settings.strict and mine["reasons"]:
        raise SystemExit("--strict: not replayed: " + "; ".join(mine["reasons"]))
    for _ in range(settings.warm_up):
        replay.step()
    samples = []
    for _ in range(settings.iterations):
        start = _now()
        replay.step()
        samples.append((_now() - start) * 1e3)
    if settings.profile is not None:
        _profiled(replay, settings.profile)
    collectives = replay.ops.collectives
    mine["samples_ms"] = samples
    mine["notes"] = [] if collectives is None else sorted(set(collectives.notes))
    mine["bytes"] = [] if collectives is None else collectives.bytes
    return summary(_gathered(mine, together))


def summary(every: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One object for all ranks: an iteration lasts as long as its slowest rank."""
    total, replayed = (sum(of[key] for of in every) for key in ("total", "replayed"))
    timed = sum(of["total_us"] for of in every)
    by_time = timed > 0
    share = sum(of["us"] for of in every) / timed if by_time else replayed / max(total, 1)
    reasons: dict[str, int] = defaultdict(int)
    for of in every:
        for why, count in of["reasons"].items():
            reasons[why] += count
    samples = [max(of) for of in zip(*(each["samples_ms"] for each in every), strict=True)]
    return {
        "ops_total": total,
        "ops_replayed": replayed,
        "coverage": share,
        "coverage_by": "time" if by_time else "count",
        "median_ms": statistics.median(samples) if samples else None,
        "samples_ms": samples,
        "ranks": len(every),
        "device": str(device.type),
        "not_replayed": dict(reasons),
        "notes": sorted({note for of in every for note in of["notes"]}),
        "collective_bytes": [of["bytes"] for of in every],
    }
