"""Runs a generated benchmark: makes its tensors, times iterations, reports the ops that ran."""

from __future__ import annotations

import importlib
import json
import os
import platform
import statistics
import sys
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from .capture import capture
from .checks import COMMS, LOST, REFUSED, naming, parts_of, read, refuse
from .collectives import RankCollectives, Works, gather
from .ops import Ops, RunnableOp
from .settings import HOME, data, device, is_selected, rank, reports, settings
from .tensors import available_bytes, like, make_all, needed_bytes, too_large

INTERRUPTED = 130
TEARDOWN_S = 0.3
"""gloo's threads may abort a process that ends right after its last collective."""


def _now() -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def own_data() -> dict[str, Any]:
    """Read this rank's recording, or another rank's if there is none."""
    with naming("data.json"):
        recorded = data["ranks"]
        at = recorded.index(rank) if rank in recorded else rank % len(recorded)
    return read(HOME / f"rank{at}.json") | {"file": f"rank{at}.json"}


def main(iteration: Sequence[Any], ops: Ops) -> None:
    """Try, warm up, time, profile, and report on rank 0."""
    torch.set_num_threads(settings.threads)
    # newer versions of torch deprecate names that older ones have no other names for
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", message=".*an autograd kernel was not registered")
    if settings.last_op is not None:
        Thread(target=_end_with_parent, daemon=True).start()
    code = 0
    try:
        _main(iteration, ops)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else REFUSED
    except KeyboardInterrupt:
        code = INTERRUPTED
    except Exception as error:
        print(_describe(error), file=sys.stderr)
        code = LOST if isinstance(error, RuntimeError) else REFUSED
    sys.stdout.flush()
    sys.stderr.flush()
    # an orderly end may hang or abort in gloo's threads
    os._exit(code)


def _end_with_parent() -> None:
    """End with the process that started this rank: it keeps the input open while it lives."""
    with suppress(OSError):
        while os.read(0, 1):
            pass
    os._exit(REFUSED)


def _describe(error: Exception) -> str:
    """Describe an error with the line of the program that it came from."""
    if isinstance(error, OSError):
        return f"rank {rank}: {error.filename or 'a file'}: {error.strerror or error}"
    frames = traceback.extract_tb(error.__traceback__)
    where = next((frame for frame in reversed(frames) if Path(frame.filename).parent == HOME), None)
    place = f"{Path(where.filename).name} line {where.lineno}: " if where else ""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"rank {rank}: {place}{type(error).__name__}: {first}"


def _main(iteration: Sequence[Any], ops: Ops) -> None:
    mine = own_data()
    if Path(sys.argv[0]).name != mine["program"]:
        program = importlib.import_module(Path(mine["program"]).stem)
        iteration, ops = program.ITERATION, program.ops
    if settings.profile is not None:
        settings.profile.mkdir(parents=True, exist_ok=True)
    if device.type == "cuda":
        if device.index >= torch.cuda.device_count():
            refuse(f"rank {rank} has no GPU: there are {torch.cuda.device_count()}; try --ranks")
        torch.cuda.set_device(device)
    with torch.no_grad():
        with naming(mine["file"]):
            alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
            together = not alone or any(map(is_comm, mine["calls"]))
            if together:
                ops.collectives = RankCollectives(mine["groups"], device)
                ops.collectives.start()
            replay = Replay(iteration, ops, mine)
            _check(replay, together)
            replay.make_tensors()
        result = run(replay, together)
    if rank == 0:
        text = json.dumps(result, indent=1)
        print(text) if settings.result is None else settings.result.write_text(text)
    if together:
        time.sleep(TEARDOWN_S)


def _check(replay: Replay, together: bool) -> None:
    """Refuse a run without ops, or with more tensors than memory, before any rank fills them."""
    host, own = platform.node(), needed_bytes(replay.mine, replay.counted)
    own_report: dict[str, Any] = {"host": host, "needed": own, "ran": len(replay.counted)}
    every = gather(own_report) if together else [own_report]
    if replay.ran and not any(report["ran"] for report in every):
        present = {replay.calls[at]["op"] for at in replay.ran}
        near = [name for text in settings.ops for name in get_close_matches(text, present)]
        hint = f"; near it: {', '.join(near)}" if near else ""
        refuse(
            f"nothing runs: no op is one of --ops {', '.join(settings.ops)} in --subset "
            f"{settings.subset}{hint}"
        )
    if device.type == "cuda":
        problem = too_large([own], torch.cuda.mem_get_info(device)[0])
    else:
        here = [report["needed"] for report in every if report["host"] == host]
        problem = too_large(here, available_bytes())
    if problem:
        refuse(problem)


def run(replay: Replay, together: bool) -> dict[str, Any]:
    """Time the iterations, and return times and coverage of all ranks."""
    begun = _now()
    replay.try_ops()
    mine = replay.coverage()
    if settings.strict and mine["reasons"]:
        refuse("--strict: not replayed: " + "; ".join(mine["reasons"]))
    first_s = _timed(replay)
    # all ranks make the same iterations: those of the slowest
    pace = {"step": first_s, "spent": _now() - begun}
    paces = gather(pace) if together else [pace]
    step_s, spent_s = (max(rank_pace[key] for rank_pace in paces) for key in ("step", "spent"))
    warm_up, iterations = fitting(step_s, spent_s)
    samples = [] if settings.warm_up and iterations else [first_s * 1e3]
    for done in range(warm_up + iterations):
        if reports is not None:  # report progress to the process that started this rank
            total = warm_up + iterations + 1
            with suppress(OSError):
                reports.send((done + 1, total, (total - done - 1) * step_s))
        took_ms = _timed(replay) * 1e3
        samples += [took_ms] if done >= warm_up else []
    if settings.profile is not None:
        capture(replay.step, settings.profile, rank, gpu=device.type == "cuda")
    collectives = replay.ops.collectives
    mine["samples_ms"] = samples
    notes = [] if collectives is None else collectives.notes
    mine["notes"] = sorted({*notes, *replay.ops.notes()})
    if len(samples) != settings.iterations:
        mine["notes"].append(
            f"{len(samples)} of {settings.iterations} iterations were measured: one takes "
            f"{step_s:.3g} s, and --time-limit is {settings.time_limit:g} s"
        )
    mine["bytes"] = [] if collectives is None else collectives.bytes
    return summary(gather(mine) if together else [mine])


def _timed(replay: Replay) -> float:
    """Run one iteration and return its seconds."""
    start = _now()
    replay.step()
    return _now() - start


def fitting(step_s: float, spent_s: float) -> tuple[int, int]:
    """Return the iterations to warm up and to measure that end within the time limit.

    One has been made. If the time is short, at most a sixth of the rest warms up.
    """
    warm_up = max(0, settings.warm_up - 1)
    total = settings.warm_up + settings.iterations - 1
    left_s = settings.time_limit - spent_s
    if not settings.time_limit or total * step_s <= left_s:
        return warm_up, total - warm_up
    room = max(0, int(left_s / step_s))
    warm_up = min(warm_up, room // 6)
    return warm_up, room - warm_up


def summary(every: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Sum up all ranks: an iteration lasts as long as its slowest rank."""
    total, replayed = (sum(report[key] for report in every) for key in ("total", "replayed"))
    timed = sum(report["total_us"] for report in every)
    by_time = timed > 0
    share = sum(report["us"] for report in every) / timed if by_time else replayed / max(total, 1)
    reasons: dict[str, int] = defaultdict(int)
    for report in every:
        for why, count in report["reasons"].items():
            reasons[why] += count
    samples = [max(report) for report in zip(*(each["samples_ms"] for each in every), strict=True)]
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
        "notes": sorted({note for report in every for note in report["notes"]}),
        "collective_bytes": [report["bytes"] for report in every],
    }


class Replay:
    """One rank of a benchmark."""

    def __init__(self, iteration: Sequence[Any], ops: Ops, mine: dict[str, Any]) -> None:
        self.ops, self.mine = ops, mine
        self.calls = mine["calls"]
        self.parts = [part for part in parts_of(iteration, mine) if is_wanted(part)]
        if not self.parts:
            names = sorted({name for names, _ in iteration for name in names})
            refuse(
                f"--from-annotation {settings.from_annotation!r}: no part has this name; there "
                f"are: {', '.join(names)}"
            )
        self.ran = [at for _, (start, end) in self.parts for at in range(start, end)]
        self.counted = [at for at in self.ran if is_selected(name_of(self.calls[at]))]
        self.specs = {int(number): spec for number, spec in mine["specs"].items()}
        places: dict[str, list[int]] = defaultdict(list)
        for at in self.ran:
            places[name_of(self.calls[at])].append(at)
        for name, op in ops.named.items():
            op.calls = places.get(name, [])
            op.recorded = [self.calls[at].get("outputs") for at in op.calls]
            op.skipped = not is_selected(name)

    def make_tensors(self) -> None:
        """Make the tensors that an iteration reads.

        For a part alone they include the outputs of the parts before it.
        """
        indices, seed = settings.indices or data["indices"], settings.seed + rank
        up_front, count = self.mine["made"], self.mine["tensors"]
        self.template = make_all(up_front, count, device, indices, seed)
        outputs: set[int] = set()
        for at in self.ran:
            for number in self.calls[at].get("reads", ()):
                if self.template[number] is None and number not in outputs and number in self.specs:
                    self.template[number] = like(self.specs[number], device)
            outputs.update(self.calls[at].get("gives", ()))

    def step(self) -> None:
        """Run one iteration."""
        tensors, works = list(self.template), Works()
        if self.ops.collectives is not None:
            self.ops.collectives.begin()
        for op in self.ops.named.values():
            op.at = 0
        # values are not the trace's: where they fade to denormals, products would be slow
        torch.set_flush_denormal(True)
        for (_, part), _ in self.parts:
            part(tensors, works)
        torch.set_flush_denormal(False)

    def try_ops(self) -> None:
        """Run the first iteration and bind the ops that can run; collective over all ranks."""
        if self.ops.collectives is not None:
            comms = {at: self.calls[at] for at in self.counted if is_comm(self.calls[at])}
            self.ops.collectives.agree(comms, self.specs)
        self.step()
        if settings.last_op is not None:
            settings.last_op.unlink(missing_ok=True)
        for (_, part), _ in self.parts:
            names = part.__globals__
            for name, value in list(names.items()):
                if isinstance(value, RunnableOp):
                    names[name] = value.settle()

    def coverage(self) -> dict[str, Any]:
        """Return the share of the trace's ops that ran, by count and by recorded time."""
        failed = {
            op.calls[at]: why
            for op in self.ops.named.values()
            for at, why in op.reasons.items()
            if at < len(op.calls)
        }
        if self.ops.collectives is not None:
            failed |= self.ops.collectives.not_run
        left_out = self.mine["left_out"] if settings.from_annotation is None else []
        reasons: dict[str, int] = defaultdict(int)
        for at, why in failed.items():
            reasons[f"{name_of(self.calls[at])}: {why}"] += 1
        for item in left_out:
            reasons[f"{item['op']}: {item['reason']}"] += 1
        us = {at: self.calls[at].get("us") or 0 for at in self.counted}
        ran = us.keys() - failed.keys()
        return {
            "total": len(us) + len(left_out),
            "replayed": len(ran),
            "us": sum(us[at] for at in ran),
            "total_us": sum(us.values()) + sum(item["us"] or 0 for item in left_out),
            "reasons": dict(reasons),
        }


def name_of(call: dict[str, Any]) -> str:
    """Return the name of a call's op, with the overload if it has one."""
    return f"{call['op']}.{call.get('overload', '')}".removesuffix(".")


def is_comm(call: dict[str, Any]) -> bool:
    """Return True if `torch.distributed` runs the call."""
    return bool(call["op"].startswith(COMMS))


def is_wanted(part: Any) -> bool:
    """Return True if the user selected a part of the iteration."""
    (names, _), _ = part
    annotation = settings.from_annotation
    plain = [name.strip("# ") for name in names]
    return annotation is None or annotation in names or annotation in plain
