"""A benchmark out of traces: traces -> programs -> files. The spine of `bench generate`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from predictor.errors import InputError
from predictor.trace.execution import ExecutionTrace
from predictor.trace.read import TraceSet, load_traces
from shardopt.replay.check import Scale
from shardopt.replay.doubled import scale_by_pair
from shardopt.replay.more_tables import repeat_tables
from shardopt.replay.program.build import Annotations, build
from shardopt.replay.program.program import RankProgram, join_jobs
from shardopt.replay.program.schema import has_kernel
from shardopt.replay.program.select import choose, fix_callers, open_wrappers
from shardopt.replay.program.tables import TableSummary
from shardopt.replay.program.values import fills_of
from shardopt.replay.write import write

UNSCALED = Scale()
MANY = 8
"""Kinds of ops left out for one reason, above which a note counts them."""


@dataclass(frozen=True)
class Generated:
    """A benchmark that was written.

    Args:
        programs: by rank.
        sources: names of the program files.
        notes: ops left out and substitutes, for the user.
    """

    programs: tuple[RankProgram, ...]
    sources: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def ops_total(self) -> int:
        """Number of replayable ops in the traces of all ranks."""
        return sum(len(program.calls) + len(program.left_out) for program in self.programs)

    @property
    def ops_left_out(self) -> int:
        """Number of these ops that are left out."""
        return sum(len(program.left_out) for program in self.programs)


def generate(
    paths: Sequence[str | Path],
    folder: Path,
    *,
    indices: str = "uniform",
    keep_annotations: Iterable[str] = (),
    strict: bool = False,
    join: bool = False,
    doubled: str | Path | None = None,
    scale: Scale = UNSCALED,
    tables: TableSummary | None = None,
) -> Generated:
    """Write a benchmark into a folder.

    Args:
        paths: execution traces, with their Kineto traces where there are any; one of each a rank.
        indices: default distribution of the ids of lookups: ``uniform`` or ``zipf:ALPHA``.
        keep_annotations: names of annotations to write unchanged, in addition to PyTorch's.
        strict: refuse a trace with ops that would be left out.
        join: each path is a separate job; an iteration runs the jobs one after the other.
        doubled: traces of the same job at twice the batch; they show which sizes are the batch's.
        scale: the benchmark over the traces; a larger batch needs `doubled`.
        tables: the tables that the traces' lookups read.

    Raises:
        InputError: the traces cannot be read or hold no ops; jobs have unlike ranks; `strict` is
            set and an op would be left out; or no `tables` fit a lookup.
    """
    jobs = [load_traces([path]) for path in paths] if join else [load_traces(paths)]
    annotations = Annotations(keep_annotations)
    programs = join_jobs([programs_of(job, annotations, tables) for job in jobs])
    if doubled is not None:
        programs = _scale_batch(programs, scale.batch, doubled, tables)
    if scale.tables > 1:
        programs = repeat_tables(programs, scale.tables)
    notes = [*_notes(programs, annotations), *_absent_devices(jobs)]
    omitted = sum(len(program.left_out) for program in programs)
    if strict and omitted:
        text = f"{omitted} ops would be left out\n" + "\n".join(notes)
        raise InputError(text, inputs=("strict",))
    sources = write(folder, programs, jobs, indices)
    return Generated(tuple(programs), tuple(sources), tuple(notes))


def _scale_batch(
    programs: Sequence[RankProgram], times: int, doubled: str | Path, tables: TableSummary | None
) -> list[RankProgram]:
    doubled_programs = programs_of(load_traces([doubled]), Annotations(), tables)
    ranks = [[program.rank for program in side] for side in (programs, doubled_programs)]
    if ranks[0] != ranks[1]:
        raise InputError(
            f"the trace at twice the batch has ranks {ranks[1]}, the other traces {ranks[0]}",
            inputs=("doubled",),
        )
    pairs = zip(programs, doubled_programs, strict=True)
    scaled = [scale_by_pair(base, twice, times) for base, twice in pairs]
    return [replace(program, fills=fills_of(program, tables)) for program in scaled]


def programs_of(
    traces: TraceSet, annotations: Annotations, tables: TableSummary | None = None
) -> list[RankProgram]:
    """Make the programs of a job's ranks.

    Raises:
        InputError: there are Kineto traces alone, which do not identify tensors.
    """
    if not traces.executions:
        raise InputError(
            f"{traces.traces[0].source}: a Kineto trace does not tell which op reads which tensor; "
            "give the execution trace of the same iteration too "
            "(torch.profiler.ExecutionTraceObserver)"
        )
    return [program_of(trace, traces, annotations, tables) for trace in traces.executions]


def program_of(
    trace: ExecutionTrace,
    traces: TraceSet,
    annotations: Annotations,
    tables: TableSummary | None = None,
) -> RankProgram:
    """Make the program of one rank's execution trace, with the times of its Kineto trace."""
    times = next((t for t in traces.traces if t.rank == trace.rank), None)
    trace = open_wrappers(fix_callers(trace, times))
    chosen = choose(trace, is_composite)
    if not chosen:
        raise InputError(
            f"{trace.source}: none of its {len(trace.nodes):,} nodes is an op with a schema"
        )
    host = () if times is None else times.host
    us = {e.node: e.end_us - e.start_us for e in host if e.node is not None}
    return build(trace, chosen, us, annotations, tables)


def is_composite(name: str) -> bool:
    """Return True if PyTorch makes the op of other ops on every device."""
    return has_kernel(name, "CompositeImplicitAutograd")


def _absent_devices(jobs: Sequence[TraceSet]) -> Iterable[str]:
    """Yield a note if a GPU was traced and none is here: a replay would take long."""
    import torch

    names = {trace.device_name for job in jobs for trace in job.traces if trace.device}
    if names and not torch.cuda.is_available():
        devices = ", ".join(sorted(filter(None, names))) or "GPUs"
        yield (
            f"captured on {devices}, and PyTorch sees no GPU here: `bench replay` runs the ops on "
            "the CPU, where an iteration may take minutes"
        )


def _notes(programs: Sequence[RankProgram], annotations: Annotations) -> Iterable[str]:
    counts = Counter((item.reason, item.op) for program in programs for item in program.left_out)
    kinds = Counter(reason for reason, _ in counts)
    for reason, names in kinds.items():
        if names > MANY:
            count = sum(n for (why, _), n in counts.items() if why == reason)
            yield f"{count:,} ops of {names} kinds left out: {reason}"
    for (reason, op), count in counts.most_common():
        if kinds[reason] <= MANY:
            yield f"{op}: {count} left out: {reason}; tensors that it would give are made up front"
    if annotations.replaced:
        yield (
            f"names of annotations that are not PyTorch's are numbers here "
            f"({annotations.replaced}); give a name to keep it"
        )
    yield from dict.fromkeys(note for program in programs for note in program.notes)
