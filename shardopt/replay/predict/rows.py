"""What the ranks of a benchmark do: equal calls together, in the order of their collectives.

A file of such rows holds a line of JSON a model. Its predictions need no benchmark, and laws are
fitted on those that were timed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from predictor.cost.cpu_ops import OpRow
from predictor.cost.reuse import BINS
from predictor.errors import InputError
from shardopt.files import atomic_write_text, read_bytes

FIT, TEST = "fit", "test"
KIB = 1024


@dataclass(frozen=True)
class Calls:
    """Equal calls of a program between two events.

    Args:
        segment: how many events (collectives and waits for them) come before.
        op: as the program calls it.
        rows: what one such call does, reuse and counts of all together; none for a call that
            cannot run on fake tensors.
        count: of calls.
        us: their recorded time; None where nothing was recorded.
        ms: their time in a replay here, timed inside its iterations; None where none was made.
    """

    segment: int
    op: str
    rows: tuple[OpRow, ...]
    count: int
    us: float | None
    ms: float | None = None


@dataclass(frozen=True)
class RankCalls:
    """One rank.

    Args:
        events: collectives (`kind`, `bytes` that this rank sends, `group` of ranks; none for all)
            and waits (`waits_for`, the number of a collective), in order.
        left_out: op and recorded us of what the program lacks.
    """

    calls: tuple[Calls, ...]
    events: tuple[Mapping[str, Any], ...]
    left_out: tuple[tuple[str, float | None], ...]

    @property
    def collectives(self) -> int:
        """How many it starts."""
        return sum("kind" in event for event in self.events)


@dataclass(frozen=True)
class ModelCalls:
    """A model's benchmark.

    Args:
        part: `FIT` for laws, or `TEST`.
        replay_ms: of an iteration, the median of each round, of the slowest rank.
    """

    name: str
    part: str
    replay_ms: tuple[float, ...]
    ranks: tuple[RankCalls, ...]


def rank_calls(of: Mapping[str, Any], calls_us: Sequence[float] | None = None) -> RankCalls:
    """Put equal calls of a rank together.

    Args:
        of: what `shardopt.replay.predict.op_list` writes.
        calls_us: of each call of the program, its time in a replay.
    """
    calls = of["calls"]
    inside: dict[int, list[OpRow]] = {}
    for op in of["ops"]:
        row = OpRow(op["kind"], tuple(op["sizes"]), tuple(op["reuse"]))
        inside.setdefault(op["call"], []).append(row)
    for at, _ in of["replaced"]:
        inside[at] = []
    found: dict[Any, Calls] = {}
    for at, segment in enumerate(_segments(of["events"], len(calls))):
        if at not in inside:
            continue
        op, us, _ = calls[at]
        ms = None if calls_us is None else calls_us[at] / 1e3
        one = Calls(segment, op, tuple(inside[at]), 1, us, ms)
        key = (segment, op, tuple((row.kind, row.sizes) for row in one.rows), us is None)
        found[key] = _together(found[key], one) if key in found else one
    events = tuple(_event(event, of) for event in of["events"])
    left_out = tuple((item["op"], item["us"]) for item in of["left_out"])
    return RankCalls(tuple(found.values()), events, left_out)


def _segments(events: Sequence[Mapping[str, Any]], count: int) -> list[int]:
    """Of each call, how many events come before it."""
    found, passed = [], 0
    for at in range(count):
        while passed < len(events) and events[passed]["after"] < at:
            passed += 1
        found.append(passed)
    return found


def _together(first: Calls, second: Calls) -> Calls:
    rows = tuple(
        replace(
            a,
            reuse=tuple(x + y for x, y in zip(a.reuse, b.reuse, strict=True)),
            count=a.count + b.count,
        )
        for a, b in zip(first.rows, second.rows, strict=True)
    )
    us, ms = _sum(first.us, second.us), _sum(first.ms, second.ms)
    return replace(first, rows=rows, count=first.count + second.count, us=us, ms=ms)


def _sum(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


def _event(event: Mapping[str, Any], of: Mapping[str, Any]) -> dict[str, Any]:
    if "kind" not in event:
        return {"waits_for": event["waits_for"]}
    size = of["calls"][event["call"]][2] or 0
    return {"kind": event["kind"], "bytes": size, "group": of["groups"][event["group"]]}


def write_models(path: Path, models: Sequence[ModelCalls]) -> None:
    """A line a model; times to four digits."""
    lines = [
        json.dumps(
            {
                "model": model.name,
                "part": model.part,
                "replay_ms": list(map(_short, model.replay_ms)),
                "ranks": list(map(_plain, model.ranks)),
            },
            separators=(",", ":"),
        )
        for model in models
    ]
    atomic_write_text(path, "\n".join(lines) + "\n")


def read_models(path: Path) -> list[ModelCalls]:
    """What `write_models` wrote.

    Raises:
        InputError: the file or a line of it cannot be read.
    """
    found = []
    lines = read_bytes(path, "file of calls").decode("utf-8", "replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            of = json.loads(line)
            ranks = tuple(map(_parsed, of["ranks"]))
            ms = tuple(map(float, of["replay_ms"]))
            if of["part"] not in (FIT, TEST) or not ranks or not ms or min(ms) <= 0:
                raise ValueError("needs a part, ranks and times above 0")
            found.append(ModelCalls(str(of["model"]), of["part"], ms, ranks))
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise InputError(
                f"{path}:{number}: is no model's calls: {error!r}; write the file again with "
                "shardopt bench mystique"
            ) from error
    return found


def _plain(rank: RankCalls) -> dict[str, Any]:
    calls = [
        [c.segment, c.op, c.count, _short(c.us), _short(c.ms), list(map(_plain_row, c.rows))]
        for c in rank.calls
    ]
    return {"events": rank.events, "left_out": rank.left_out, "calls": calls}


def _plain_row(row: OpRow) -> list[Any]:
    """Kind, sizes, and bin and KiB of those bins of reuse that are not empty."""
    reuse = {at: _short(size / KIB) for at, size in enumerate(row.reuse) if size}
    return [row.kind, row.sizes, reuse]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _parsed(of: Mapping[str, Any]) -> RankCalls:
    calls = tuple(
        Calls(int(segment), str(op), tuple(_row(row, count) for row in rows), int(count), us, ms)
        for segment, op, count, us, ms, rows in of["calls"]
    )
    for call in calls:
        if not all(math.isfinite(value or 0.0) for value in (call.us, call.ms)):
            raise ValueError(f"a time of {call.op} is not a number")
    left_out = tuple((str(op), us) for op, us in of["left_out"])
    return RankCalls(calls, tuple(of["events"]), left_out)


def _row(of: Sequence[Any], count: int) -> OpRow:
    kind, sizes, bins = of
    reuse = [0.0] * BINS
    for at, size in bins.items():
        reuse[int(at)] = KIB * float(size)
    return OpRow(str(kind), tuple(map(int, sizes)), tuple(reuse), count)
