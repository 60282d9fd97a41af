"""A benchmark out of a trace: traces -> programs -> files. The spine of `bench generate`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from predictor.errors import InputError
from predictor.trace.events import RankTrace
from predictor.trace.execution import ExecutionTrace
from predictor.trace.read import TraceSet, load_traces
from shardopt import __version__
from shardopt.files import atomic_write_text
from shardopt.replay.annotations import Annotations
from shardopt.replay.build import build
from shardopt.replay.emit import Source, file_of, source_of
from shardopt.replay.join import joined
from shardopt.replay.nesting import renested
from shardopt.replay.program import Call, RankProgram, TensorSpec
from shardopt.replay.scale import scaled
from shardopt.replay.select import choose

SCHEMA = "shardopt.replay/1"
MAIN = "benchmark.py"
RUNTIME = "runtime"
MODULES = ("__init__.py", "settings.py", "ops.py", "run.py", "tensors.py", "collectives.py")


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
    batch_times: int = 1,
) -> Generated:
    """Write a benchmark into a folder.

    Args:
        paths: execution traces, with their Kineto traces where there are any; one of each a rank.
        indices: how ids of lookups are drawn where no other is asked for: ``uniform`` or
            ``zipf:ALPHA``.
        keep_annotations: names of annotations to write as they are, beside PyTorch's own.
        strict: refuse a trace of which something is left out.
        join: each path is a job of its own; an iteration runs them one after the other.
        doubled: traces of the same job at twice the batch, which tell what `batch_times` scales.
        batch_times: the benchmark's batch over the traces'.

    Raises:
        InputError: the traces cannot be read, hold no ops, jobs have unlike ranks, or `strict` and
            something is left out.
    """
    jobs = [_load([path]) for path in paths] if join else [_load(paths)]
    annotations = Annotations(keep_annotations)
    programs = joined(
        [[program_of(trace, job, annotations) for trace in job.executions] for job in jobs]
    )
    if doubled is not None:
        twice = _load([doubled])
        others = [program_of(trace, twice, Annotations()) for trace in twice.executions]
        programs = [scaled(one, two, batch_times) for one, two in _by_rank(programs, others)]
    notes = list(_notes(programs, annotations))
    left = sum(len(program.left_out) for program in programs)
    if strict and left:
        raise InputError(f"--strict: {left} ops would be left out\n" + "\n".join(notes))
    sources = _write(folder, programs, jobs, indices)
    return Generated(tuple(programs), tuple(sources), tuple(notes))


def _load(paths: Sequence[str | Path]) -> TraceSet:
    found = load_traces(paths)
    if not found.executions:
        raise InputError(
            f"{paths[0]}: no execution trace; a Kineto trace alone has no tensors to tell apart. "
            "Record one with torch.profiler.ExecutionTraceObserver"
        )
    return found


def _by_rank(
    programs: Sequence[RankProgram], others: Sequence[RankProgram]
) -> Iterable[tuple[RankProgram, RankProgram]]:
    ranks = [[program.rank for program in of] for of in (programs, others)]
    if ranks[0] != ranks[1]:
        raise InputError(f"--doubled: has ranks {ranks[1]}, the other traces {ranks[0]}")
    return zip(programs, others, strict=True)


def program_of(
    trace: ExecutionTrace, found: TraceSet | None, annotations: Annotations
) -> RankProgram:
    """The program of one rank."""
    times = next((t for t in found.traces if t.rank == trace.rank), None) if found else None
    trace = renested(trace, times)
    chosen = choose(trace, is_composite)
    if not chosen:
        raise InputError(
            f"{trace.source}: none of its {len(trace.nodes):,} nodes is an op with a schema"
        )
    return build(trace, chosen, _durations(times), annotations)


def is_composite(name: str) -> bool:
    """PyTorch makes the op of others wherever it runs."""
    import torch

    try:
        return bool(
            torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
        )
    except RuntimeError:
        return False


def _durations(times: RankTrace | None) -> dict[int, float]:
    """Id of a node -> microseconds on the host."""
    events = () if times is None else times.host
    return {e.node: e.end_us - e.start_us for e in events if e.node is not None}


def _notes(programs: Sequence[RankProgram], annotations: Annotations) -> Iterable[str]:
    reasons: Counter[tuple[str, str]] = Counter()
    for program in programs:
        reasons.update((item.op, item.reason) for item in program.left_out)
    for (op, reason), count in reasons.most_common():
        yield (f"{op}: {count} left out: {reason}; tensors that it would give are made up front")
    if annotations.replaced:
        yield (
            f"{annotations.replaced} names of annotations are not PyTorch's and are written as "
            "numbers; --keep-annotation NAME keeps one"
        )
    yield from dict.fromkeys(note for program in programs for note in program.notes)


def _write(
    folder: Path, programs: Sequence[RankProgram], jobs: Sequence[TraceSet], indices: str
) -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    sources = [source_of(program) for program in programs]
    files: dict[int, str] = {}
    constants: dict[int, list[Any]] = {}
    names = []
    for at, members in enumerate(_alike(sources)):
        name = MAIN if at == 0 else f"benchmark_{at}.py"
        varying = _varying([sources[i] for i in members])
        for i in members:
            numbers = sources[i].numbers
            constants[i] = [numbers[position] for position in varying]
            files[i] = name
        title = _title([programs[i].rank for i in members], programs)
        places = {position: place for place, position in enumerate(varying)}
        text = file_of(sources[members[0]], places, title, len(programs))
        atomic_write_text(folder / name, text)
        names.append(name)
    for i, program in enumerate(programs):
        data = rank_object(program, files[i], sources[i], constants[i])
        atomic_write_text(folder / f"rank{i}.json", _json(data))
    package = resources.files("shardopt.replay") / RUNTIME
    (folder / RUNTIME).mkdir(exist_ok=True)
    for name in MODULES:
        text = (package / name).read_text(encoding="utf-8")
        atomic_write_text(folder / RUNTIME / name, text)
    atomic_write_text(folder / "data.json", _json(_common(programs, jobs, indices)))
    return names


def _common(
    programs: Sequence[RankProgram], jobs: Sequence[TraceSet], indices: str
) -> dict[str, Any]:
    sizes = [e.world_size for job in jobs for e in job.executions if e.world_size]
    world = max([*sizes, *(program.rank + 1 for program in programs)])
    world = max(world, *(max(group, default=-1) + 1 for p in programs for group in p.groups), 1)
    return {
        "schema": SCHEMA,
        "ranks": [program.rank for program in programs],
        "world_size": world,
        "indices": indices,
        "provenance": {
            "trace_schema": jobs[0].executions[0].schema,
            "kineto": all(job.traces for job in jobs),
            "shardopt": __version__,
        },
    }


def rank_object(
    program: RankProgram, file: str, source: Source, constants: list[Any]
) -> dict[str, Any]:
    """What a rank's data file holds."""
    last = max((n for call in program.calls for n in (*call.reads(), *call.gives())), default=-1)
    return {
        "rank": program.rank,
        "program": file,
        "parts": source.parts,
        "tensors": last + 1,
        "c": constants,
        "groups": [list(group) for group in program.groups],
        "made": {
            str(number): {**_spec(spec), **_fill(program.fills.get(number))}
            for number, spec in program.made.items()
            if number <= last
        },
        "calls": [_call(call) for call in program.calls if call.op != "wait"],
        "left_out": [
            {"op": item.op, "reason": item.reason, "us": item.us} for item in program.left_out
        ],
    }


def _spec(spec: TensorSpec) -> dict[str, Any]:
    made: dict[str, Any] = {
        "shape": spec.shape,
        "strides": spec.strides,
        "dtype": spec.dtype,
        "storage": spec.storage,
    }
    if spec.offset:
        made["offset"] = spec.offset
    if spec.host:
        made["host"] = True
    return made


def _fill(fill: Mapping[str, Any] | None) -> dict[str, Any]:
    return {} if fill is None else {"fill": dict(fill)}


def _call(call: Call) -> dict[str, Any]:
    kept: dict[str, Any] = {"op": call.op}
    if call.overload:
        kept["overload"] = call.overload
    reads, gives = sorted(set(call.reads())), call.gives()
    if reads:
        kept["reads"] = reads
    if gives:
        kept["gives"] = gives
    if call.specs:
        kept["outputs"] = [_specs(spec) for spec in call.specs]
    if call.us is not None:
        kept["us"] = round(call.us, 3)
    if call.bytes is not None:
        kept["bytes"] = call.bytes
    return kept


def _specs(spec: Any) -> Any:
    if isinstance(spec, tuple):
        return [_specs(item) for item in spec]
    return None if spec is None else [spec.shape, spec.strides, spec.dtype]


def _json(data: Mapping[str, Any]) -> str:
    """A line an entry of long lists, so that files can be read and compared by eye."""
    lines = []
    for key, value in data.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            inner = ",\n".join(f"  {json.dumps(item)}" for item in value)
            lines.append(f" {json.dumps(key)}: [\n{inner}\n ]")
        elif key == "made":
            inner = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            lines.append(f' "made": {{\n{inner}\n }}')
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _alike(sources: Sequence[Source]) -> list[list[int]]:
    """Positions of ranks whose programs differ in numbers alone."""
    classes: dict[object, list[int]] = {}
    for i, source in enumerate(sources):
        classes.setdefault(source.pattern, []).append(i)
    return list(classes.values())


def _varying(sources: Sequence[Source]) -> list[int]:
    """Positions of the numbers that differ."""
    columns = zip(*(source.numbers for source in sources), strict=True)
    return [i for i, column in enumerate(columns) if any(n != column[0] for n in column)]


def _title(ranks: Sequence[int], programs: Sequence[RankProgram]) -> str:
    calls = len(next(p for p in programs if p.rank == ranks[0]).calls)
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return f"One iteration of {calls} ops, as {who} of a traced job ran it."
