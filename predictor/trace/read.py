"""Reads the traces of a job, of one rank or more, from files, folders and archives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from predictor.errors import InputError
from predictor.trace.attach import attach
from predictor.trace.clocks import on_one_clock, program_notes
from predictor.trace.events import RankTrace
from predictor.trace.execution import NODES, ExecutionReader, ExecutionTrace
from predictor.trace.files import TraceFile, open_traces
from predictor.trace.json_stream import read_object, text_of
from predictor.trace.kineto import TRACE_EVENTS, KinetoReader

LISTED = 16

Document = TypeVar("Document", RankTrace, ExecutionTrace)


@dataclass(frozen=True)
class TraceSet:
    """Everything that was read.

    Args:
        traces: by rank, each rank once, on one clock; tied to its execution trace where there is
            one.
        executions: by rank, each rank once.
        notes: about the set as a whole: what is missing, what was left out.
    """

    traces: tuple[RankTrace, ...]
    executions: tuple[ExecutionTrace, ...] = field(default=())
    notes: tuple[str, ...] = field(default=())


def read_traces(paths: Sequence[str | Path]) -> list[RankTrace]:
    """The Kineto traces among these files, folders and archives, by rank.

    Raises:
        InputError: as `load_traces`, or there are only execution traces, which have no times.
    """
    found = load_traces(paths)
    if not found.traces:
        sources = ", ".join(e.source for e in found.executions[:2])
        raise InputError(
            f"{sources}: execution traces hold no times; give the Kineto traces of the run too"
        )
    return list(found.traces)


def load_traces(paths: Sequence[str | Path], *, keep_args: bool = False) -> TraceSet:
    """Read everything under these paths and match the traces of each rank.

    Args:
        paths: .json, .json.gz, .tar, .tar.gz, .tgz, folders of these; Kineto and execution traces
            in any order. One file a rank and kind.
        keep_args: fill `HostEvent.args`.

    Raises:
        InputError: a file is missing, cut off or no trace; nothing was found.
    """
    traces: dict[int, RankTrace] = {}
    executions: dict[int, ExecutionTrace] = {}
    notes: list[str] = []
    for file in open_traces(paths):
        document = _read(file, keep_args)
        if document is None:
            notes.append(f"{file.source}: not a trace; left out")
        elif isinstance(document, RankTrace):
            _add(traces, document, notes)
        else:
            _add(executions, document, notes)
    if not traces and not executions:
        raise InputError(f"{', '.join(map(str, paths))}: no traces found")
    for rank in sorted(executions.keys() & traces.keys()):
        traces[rank] = attach(traces[rank], executions[rank])
    found, clocks = on_one_clock([traces[rank] for rank in sorted(traces)])
    notes += [*_missing(found, executions), *clocks, *program_notes(found)]
    return TraceSet(found, tuple(executions[r] for r in sorted(executions)), tuple(notes))


def _read(file: TraceFile, keep_args: bool) -> RankTrace | ExecutionTrace | None:
    """One document; None for JSON files that are not traces."""
    kineto = KinetoReader(file.source, keep_args=keep_args)
    execution = ExecutionReader(file.source)
    arrays = {TRACE_EVENTS: kineto.take, NODES: execution.take}
    rest = read_object(text_of(file.chunks()), arrays, file.source)
    if TRACE_EVENTS in rest:
        return kineto.finish(rest)
    if NODES in rest:
        return execution.finish(rest)
    if file.named:
        raise InputError(
            f"{file.source}: JSON without `{TRACE_EVENTS}` (Kineto) or `{NODES}` (execution "
            "trace): not a trace of PyTorch's"
        )
    return None


def _add(found: dict[int, Document], document: Document, notes: list[str]) -> None:
    other = found.setdefault(document.rank, document)
    if other is not document:
        notes.append(
            f"{document.source}: left out, as {other.source} is of rank {document.rank} too"
        )


def _missing(traces: Sequence[RankTrace], executions: Iterable[int]) -> Iterator[str]:
    """Notes on ranks of the job that were not given."""
    have = {trace.rank for trace in traces}
    alone = sorted(set(executions) - have)
    if alone:
        yield f"no times for {_ranks(alone)}: execution traces without their Kineto traces"
    sizes = {trace.world_size for trace in traces if trace.world_size is not None}
    if len(sizes) > 1:
        yield f"the traces name different world sizes: {', '.join(map(str, sorted(sizes)))}"
    groups = {
        event.collective.group or ()
        for trace in traces
        for event in trace.device
        if event.collective is not None
    }
    members: set[int] = set().union(*groups)
    expected = members | set(range(min(max(sizes, default=0), 1 << 16)))
    absent = sorted(expected - have)
    if traces and absent:
        yield (
            f"{_ranks(absent)} of {len(expected)} not given: the time of a collective includes "
            "waiting for them"
        )


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > LISTED:
        return f"{len(ranks):,} ranks"
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
