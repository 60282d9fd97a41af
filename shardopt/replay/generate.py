"""A benchmark out of traces: traces -> programs -> files. The spine of `bench generate`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from predictor.errors import InputError
from predictor.trace.events import RankTrace
from predictor.trace.execution import ExecutionTrace
from predictor.trace.read import TraceSet, load_traces
from shardopt.replay.check import Scale
from shardopt.replay.kineto.imitate import imitate
from shardopt.replay.program.build import Annotations, build
from shardopt.replay.program.program import RankProgram, join_jobs
from shardopt.replay.program.schema import has_gpu, has_kernel
from shardopt.replay.program.select import choose, fix_callers, open_wrappers
from shardopt.replay.program.tables import MatchedTables, TableSummary
from shardopt.replay.scale.doubled import scale_by_pair
from shardopt.replay.scale.tables import repeat_tables
from shardopt.replay.write import write

UNSCALED = Scale()
MANY = 8
"""Kinds of ops left out for one reason, above which a note counts them."""


@dataclass(frozen=True)
class Generated:
    """What was written.

    Args:
        programs: by rank.
        sources: names of the program files.
        notes: what was left out or done instead, for the user.
    """

    programs: tuple[RankProgram, ...]
    sources: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def ops_total(self) -> int:
        """Ops of all ranks' traces that a replay could have."""
        return sum(
            sum(call.op != "wait" for call in p.calls) + len(p.left_out) for p in self.programs
        )

    @property
    def left(self) -> int:
        """Of these, what is left out."""
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
    samples: int | None = None,
    scale: Scale = UNSCALED,
    tables: TableSummary | None = None,
) -> Generated:
    """Write a benchmark into a folder.

    Args:
        paths: execution traces, with their Kineto traces where there are any, or Kineto traces
            alone; one of each a rank.
        indices: how ids of lookups are drawn where no other is asked for: ``uniform`` or
            ``zipf:ALPHA``.
        keep_annotations: names of annotations to write unchanged, in addition to PyTorch's.
        strict: refuse a trace of which something is left out.
        join: each path is a separate job; an iteration runs the jobs one after the other.
        doubled: traces of the same job at twice the batch, which tell which sizes are the batch's.
        samples: of a rank in the traces, where these do not tell.
        scale: the benchmark over the traces.
        tables: that the traces' lookups read.

    Raises:
        InputError: the traces cannot be read, hold no ops, jobs have unlike ranks, or `strict` and
            something is left out, or `tables` are not those of a lookup.
    """
    jobs = [_load([path]) for path in paths] if join else [_load(paths)]
    annotations = Annotations(keep_annotations)
    programs = join_jobs([programs_of(job, annotations, tables) for job in jobs])
    if doubled is not None:
        twice = _load([doubled])
        others = programs_of(twice, Annotations(), tables)
        programs = [
            scale_by_pair(one, two, scale.batch, _match_tables(tables, one.rank))
            for one, two in _by_rank(programs, others)
        ]
    elif scale.batch > 1:
        from shardopt.replay.scale.one import scale_alone

        programs = [
            scale_alone(of, scale.batch, samples, _match_tables(tables, of.rank)) for of in programs
        ]
    if scale.tables > 1:
        programs = repeat_tables(programs, scale.tables)
    notes = [*_notes(programs, annotations), *_absent_devices(jobs)]
    left = sum(len(program.left_out) for program in programs)
    if strict and left:
        raise InputError(f"{left} ops would be left out\n" + "\n".join(notes), inputs=("strict",))
    sources = write(folder, programs, jobs, indices)
    return Generated(tuple(programs), tuple(sources), tuple(notes))


def _load(paths: Sequence[str | Path]) -> TraceSet:
    return load_traces(paths, keep_args=True)


def _by_rank(
    programs: Sequence[RankProgram], others: Sequence[RankProgram]
) -> Iterable[tuple[RankProgram, RankProgram]]:
    ranks = [[program.rank for program in of] for of in (programs, others)]
    if ranks[0] != ranks[1]:
        raise InputError(
            f"the trace at twice the batch has ranks {ranks[1]}, the other traces {ranks[0]}",
            inputs=("doubled",),
        )
    return zip(programs, others, strict=True)


def programs_of(
    found: TraceSet, annotations: Annotations, tables: TableSummary | None = None
) -> list[RankProgram]:
    """The programs of a job's ranks; from Kineto traces where there is no execution trace."""
    if found.executions:
        return [program_of(trace, found, annotations, tables) for trace in found.executions]
    return [_of_kineto(trace, annotations, tables) for trace in found.traces]


def _of_kineto(
    trace: RankTrace, annotations: Annotations, tables: TableSummary | None
) -> RankProgram:
    made = imitate(trace)
    program = build(
        made.trace, made.chosen, made.us, annotations, _match_tables(tables, trace.rank)
    )
    return replace(
        program,
        left_out=[*program.left_out, *made.left_out],
        notes=[*program.notes, *made.notes],
    )


def program_of(
    trace: ExecutionTrace,
    found: TraceSet | None,
    annotations: Annotations,
    tables: TableSummary | None = None,
) -> RankProgram:
    """The program of one rank."""
    times = next((t for t in found.traces if t.rank == trace.rank), None) if found else None
    trace = open_wrappers(fix_callers(trace, times))
    chosen = choose(trace, is_composite)
    if not chosen:
        raise InputError(
            f"{trace.source}: none of its {len(trace.nodes):,} nodes is an op with a schema"
        )
    matched = _match_tables(tables, trace.rank)
    host = () if times is None else times.host
    us = {e.node: e.end_us - e.start_us for e in host if e.node is not None}
    return build(trace, chosen, us, annotations, matched)


def _match_tables(tables: TableSummary | None, rank: int) -> MatchedTables | None:
    return None if tables is None else MatchedTables(tables, rank)


def is_composite(name: str) -> bool:
    """PyTorch makes the op of others wherever it runs."""
    return has_kernel(name, "CompositeImplicitAutograd")


def _absent_devices(jobs: Sequence[TraceSet]) -> Iterable[str]:
    """That the traced GPUs are not here, where a replay would take long."""
    names = {trace.device_name for job in jobs for trace in job.traces if trace.device}
    if names and not has_gpu():
        known = ", ".join(sorted(filter(None, names))) or "GPUs"
        yield (
            f"captured on {known}, and PyTorch sees no GPU here: `bench replay` runs the ops on "
            "the CPU, where an iteration may take minutes"
        )


def _notes(programs: Sequence[RankProgram], annotations: Annotations) -> Iterable[str]:
    reasons: Counter[tuple[str, str]] = Counter()
    for program in programs:
        reasons.update((item.op, item.reason) for item in program.left_out)
    kinds = Counter(reason for _, reason in reasons)
    for reason, names in kinds.items():
        if names > MANY:
            count = sum(n for (_, why), n in reasons.items() if why == reason)
            yield f"{count:,} ops of {names} kinds left out: {reason}"
    for (op, reason), count in reasons.most_common():
        if kinds[reason] > MANY:
            continue
        yield (f"{op}: {count} left out: {reason}; tensors that it would give are made up front")
    if annotations.replaced:
        yield (
            f"names of annotations that are not PyTorch's are numbers here "
            f"({annotations.replaced}); give a name to keep it"
        )
    yield from dict.fromkeys(note for program in programs for note in program.notes)
