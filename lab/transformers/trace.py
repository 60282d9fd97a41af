"""Execution trace and Kineto trace of a step of each family, and its op list looked up in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lab.quiet_ranks import prepare_on_last_cores
from lab.transformer import FAMILIES
from lab.transformers.design import calibrations
from lab.transformers.files import TRACED_STEP, TRACES, TracedStep
from shardopt.measure.store import write_rows
from shardopt.ranks.rank import Rank, Report

if TYPE_CHECKING:
    from shardopt.torchrec.capture.recorder import Recording

WARM_UP = 3
PREFIX = "aten::"


def op_names(recording: Recording) -> list[str]:
    """Ops of a list that touch data; the views that autograd saves are in no trace."""
    return [recorded.op for recorded in recording.calls if recorded.call.moves]


def count_in_order(names: Sequence[str], trace: Iterable[str]) -> int:
    """How many ops of a list a trace holds in the list's order.

    The trace has more: composite ops, which issue those of the list, and what those run inside.
    Gradients that meet are added in place, but for steps under a dispatch mode, as the list is.
    """
    left = (name.rstrip("_") for name in trace)
    return sum(1 for name in names if name.rstrip("_") in left)


def kineto_ops(path: Path) -> list[str]:
    """Names of all ops of a Kineto trace, in the order of their starts."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    spans = [event for event in events if event.get("cat") == "cpu_op"]
    spans.sort(key=lambda event: (event["ts"], -event["dur"]))
    return [event["name"].removeprefix(PREFIX) for event in spans]


def execution_ops(path: Path) -> list[str]:
    """Names of all ops of an execution trace, which numbers them as they start."""
    nodes: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["nodes"]
    return [node["name"].removeprefix(PREFIX) for node in sorted(nodes, key=_number)]


def _number(node: dict[str, Any]) -> int:
    return int(node["id"])


def trace_families(rank: Rank, report: Report, folder: Path) -> None:
    """Trace one shape a family and write what was found; for a single rank."""
    prepare_on_last_cores(rank)
    rows = []
    for family in FAMILIES:
        shape = next(shape for shape in calibrations(1) if shape.family == family)
        rows.append(_look_up(folder / "traces" / shape.name, shape))
    write_rows(folder / TRACES, TRACED_STEP, rows)


def _look_up(folder: Path, shape: Any) -> TracedStep:

    from lab.replay.transformers import Training
    from lab.transformers.ops import record_step
    from shardopt.replay.runtime.capture import capture

    names = op_names(record_step(shape))
    training = Training(shape)
    for _ in range(WARM_UP):
        training.step()
    execution, kineto = capture(training.step, folder, 0)
    in_execution = count_in_order(names, execution_ops(execution))
    in_kineto = count_in_order(names, kineto_ops(kineto))
    return TracedStep(shape.name, len(names), in_execution, in_kineto)
