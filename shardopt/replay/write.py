"""The files of a benchmark: programs, what is made up front on each rank, and the runtime."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from predictor.trace.read import TraceSet
from shardopt.files import atomic_write_text
from shardopt.replay.program.program import (
    WITH_GRAD,
    Call,
    Number,
    RankProgram,
    Slot,
    TensorSpec,
    Term,
    Word,
    flat,
    nested,
)
from shardopt.version import __version__

SCHEMA = "shardopt.replay/1"
MAIN = "benchmark.py"
RUNTIME = "runtime"
VERSION = re.compile(r"[\d.]+(-chakra[\d.]+)?")


def write(
    folder: Path, programs: Sequence[RankProgram], jobs: Sequence[TraceSet], indices: str
) -> list[str]:
    """Write the programs of all ranks; gives the names of their files.

    Args:
        jobs: that the programs come from.
        indices: how ids are drawn where nothing else says it.
    """
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
    for module in package.iterdir():
        if module.name.endswith(".py"):
            text = module.read_text(encoding="utf-8")
            atomic_write_text(folder / RUNTIME / module.name, text)
    atomic_write_text(folder / "data.json", _json(_common(programs, jobs, indices)))
    return names


def _common(
    programs: Sequence[RankProgram], jobs: Sequence[TraceSet], indices: str
) -> dict[str, Any]:
    worlds = [of.world_size for job in jobs for of in job.executions or job.traces]
    sizes = [size for size in worlds if size]
    world = max([*sizes, *(program.rank + 1 for program in programs)])
    world = max(world, *(max(group, default=-1) + 1 for p in programs for group in p.groups), 1)
    return {
        "schema": SCHEMA,
        "ranks": [program.rank for program in programs],
        "world_size": world,
        "indices": indices,
        "provenance": {
            "trace_schema": _version(jobs[0]),
            "kineto": all(job.traces for job in jobs),
            "shardopt": __version__,
        },
    }


def _version(job: TraceSet) -> str:
    """Version of the traces' format, where its text is nothing but one."""
    if not job.executions:
        return "kineto"
    match = VERSION.match(job.executions[0].schema)
    return match[0] if match else "unknown"


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
            str(number): _spec(spec, program.fills.get(number))
            for number, spec in program.made.items()
            if number <= last
        },
        "calls": _calls(program.calls),
        "left_out": [
            {"op": item.op, "reason": item.reason, "us": item.us} for item in program.left_out
        ],
    }


def _spec(spec: TensorSpec, fill: Mapping[str, Any] | None) -> dict[str, Any]:
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
    if fill is not None:
        made["fill"] = dict(fill)
    return made


def _calls(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """The ops; a wait is with the op that it follows, by the number of its collective."""
    made: list[dict[str, Any]] = []
    started: dict[int, int] = {}
    for at, call in enumerate(calls):
        if call.op != "wait":
            made.append(_call(call))
            if call.is_collective:
                started[at] = len(started)
        elif isinstance(target := call.arguments[0], Number) and int(target.value) in started:
            made[-1].setdefault("waits", []).append(started[int(target.value)])
    return made


def _call(call: Call) -> dict[str, Any]:
    kept: dict[str, Any] = {"op": call.op, "arguments": [_term(of) for of in call.arguments]}
    if call.keywords:
        kept["keywords"] = {name: _term(of) for name, of in call.keywords.items()}
    if gives := call.gives():
        kept["targets"] = [output if flat(output) else None for output in call.outputs]
    if call.frees:
        kept["frees"] = call.frees
    if call.collective == WITH_GRAD:
        kept["with_grad"] = True
    if call.overload:
        kept["overload"] = call.overload
    if reads := sorted(set(call.reads())):
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


def _term(term: Term) -> Any:
    """An argument as the program spells it; `predict.op_list` reads it back."""
    if isinstance(term, tuple):
        return [_term(item) for item in term]
    if isinstance(term, Slot):
        return f"t[{term.number}]"
    if isinstance(term, Word):
        return term.text
    return None if term is None else term.value


def _specs(spec: Any) -> Any:
    return nested(lambda s: None if s is None else [s.shape, s.strides, s.dtype], spec)


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


RESERVED = frozenset(
    {
        "t", "c", "work", "torch", "Ops", "main", "cpu", "device", "stream", "ops", "float",
        "ITERATION", "forward", "backward",
    }
)  # fmt: skip
"""Names that a program uses."""
MARK = "\0"
"""Stands for a number in a line."""
MAX_CALLS = 120
"""Of one function."""
HEADER = '''"""{title}

Written by `shardopt bench generate`; runs with torch alone:

    torchrun --nproc-per-node {ranks} benchmark.py --help

`t` holds tensors by number, `c` numbers that differ between ranks, `work` collectives under way.
Tensors that no op gives are described in rank*.json and made before the first iteration.
"""

import torch
from runtime.ops import Ops
from runtime.run import main
from runtime.settings import cpu, device, stream

ops = Ops()
'''


@dataclass(frozen=True)
class Source:
    """A rank's program as lines.

    Args:
        imports: lines that name the ops.
        sections: annotations, and lines of a function, with `MARK` in place of each number.
        numbers: all in order; they may differ between ranks.
        parts: of a section: its first call, and the one after its last.
    """

    imports: tuple[str, ...]
    sections: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...]
    numbers: tuple[int | float | bool, ...]
    parts: tuple[tuple[int, int], ...]

    @property
    def pattern(self) -> object:
        """Ranks with one pattern share a file."""
        return self.imports, self.sections, tuple(map(type, self.numbers))


def source_of(program: RankProgram) -> Source:
    """The lines of a program."""
    names: dict[str, str] = {}
    sections: list[tuple[tuple[str, ...], list[str]]] = []
    numbers: list[int | float | bool] = []
    works: dict[int, int] = {}
    parts: list[list[int]] = []
    count = 0
    for at, call in enumerate(program.calls):
        if not sections or sections[-1][0] != call.section or len(sections[-1][1]) >= MAX_CALLS:
            sections.append((call.section, []))
            parts.append([count, count])
        if call.is_collective:
            works[at] = len(works)
        lines = sections[-1][1]
        if call.op == "wait":
            target = call.arguments[0]
            if isinstance(target, Number) and int(target.value) in works:
                lines.append(f"work[{works[int(target.value)]}].wait()")
            continue
        count += 1
        parts[-1][1] = count
        lines.append(_line(call, names, numbers))
        if call.frees:
            lines.append(" = ".join(f"t[{n}]" for n in call.frees) + " = None")
    return Source(
        tuple(f"{name} = {made}" for name, made in sorted(names.items())),
        tuple((name, tuple(lines)) for name, lines in sections),
        tuple(numbers),
        tuple((first, last) for first, last in parts),
    )


def file_of(source: Source, varying: dict[int, int], title: str, ranks: int) -> str:
    """A whole file.

    Args:
        varying: position of a number -> its place in `c`.
    """
    text = [HEADER.format(title=title, ranks=ranks), *source.imports, "", ""]
    numbers = iter(
        repr(number) if (place := varying.get(position)) is None else f"c[{place}]"
        for position, number in enumerate(source.numbers)
    )
    listed = []
    for at, (names, body) in enumerate(source.sections):
        text.append(f"def {_function(at, names)}(t, c, work):")
        text += [f'    """{_quote(" / ".join(names) or "not annotated")}"""']
        text += ["    " + re.sub(MARK, lambda _: next(numbers), line) for line in body]
        text += ["", ""]
        listed.append(f"    ({tuple(names)!r}, {_function(at, names)}),")
    text += ["ITERATION = [", *listed, "]", "", 'if __name__ == "__main__":']
    text += ["    main(ITERATION, ops)", ""]
    return "\n".join(text)


def _quote(text: str) -> str:
    return text.replace("\\", "").replace('"', "'")


def _function(at: int, names: Sequence[str]) -> str:
    return f"part_{at}_{_identifier(names[-1]).strip('_').lower() if names else 'part'}"


def _identifier(text: str) -> str:
    return re.sub(r"\W+", "_", text, flags=re.ASCII)


def _line(call: Call, names: dict[str, str], numbers: list[int | float | bool]) -> str:
    """The line of an op; its numbers are added to `numbers`."""
    called, first = _name(call, names)
    arguments = [first] if first else []
    arguments += [_text(term, numbers) for term in call.arguments]
    arguments += [f"{name}={_text(term, numbers)}" for name, term in call.keywords.items()]
    made = f"{called}({', '.join(arguments)})"
    if call.is_collective:
        return f"work.append({made})"
    return ", ".join(map(_place, call.outputs)) + f" = {made}" if call.gives() else made


def _place(output: object) -> str:
    if output is None:
        return "_"
    if isinstance(output, tuple):
        return f"[{', '.join(map(_place, output))}]" if any(map(flat, output)) else "_"
    return f"t[{output}]"


def _name(call: Call, names: dict[str, str]) -> tuple[str, str]:
    """The function that a line calls, and its first argument if that is not one of the op's."""
    if call.is_collective:
        wanted = _identifier(call.collective).strip("_")
        return _named(wanted, f"ops.collective({call.collective!r})", names), ""
    if call.op.startswith("backward of "):
        names["backward"] = "ops.backward"
        return "backward", ""
    overload = "" if call.overload == "default" else f"_{call.overload}"
    name = _named(_identifier(call.op) + overload, f"ops({call.op!r}, {call.overload!r})", names)
    if call.collective == WITH_GRAD:
        names["forward"] = "ops.forward"
        return "forward", name
    return name, ""


def _named(wanted: str, made: str, names: dict[str, str]) -> str:
    """A name of the module for an op, which no other name of the program or of Python is."""
    taken = wanted in RESERVED or keyword.iskeyword(wanted) or wanted.startswith(("__", "part_"))
    name = wanted if wanted.isidentifier() and not taken else f"op_{wanted}"
    # an op may be named as another with its overload
    while names.setdefault(name, made) != made:
        name += "_"
    return name


def _text(term: Term, numbers: list[int | float | bool]) -> str:
    if isinstance(term, tuple):
        return f"[{', '.join(_text(item, numbers) for item in term)}]"
    if isinstance(term, Number):
        numbers.append(term.value)
        return MARK
    return str(_term(term))
