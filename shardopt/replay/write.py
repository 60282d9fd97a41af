"""The files of a benchmark: programs, the tensors made up front on each rank, and the runtime."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any

from predictor.trace.read import TraceSet
from shardopt.files import atomic_write_text
from shardopt.replay.program.program import (
    Call,
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


def write(
    folder: Path, programs: Sequence[RankProgram], jobs: Sequence[TraceSet], indices: str
) -> list[str]:
    """Write the programs of all ranks and return the names of their files.

    Ranks that run the same program share a file.

    Args:
        jobs: source of the programs.
        indices: default distribution of ids.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sources = [source_of(program) for program in programs]
    files: dict[str, str] = {}
    for source in sources:
        name = MAIN if not files else f"benchmark_{len(files)}.py"
        files.setdefault(source.body, name)
    for body, name in files.items():
        ranks = [p.rank for p, source in zip(programs, sources, strict=True) if source.body == body]
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        atomic_write_text(folder / name, HEADER.format(who=who, ranks=len(programs)) + body)
    for i, (program, source) in enumerate(zip(programs, sources, strict=True)):
        data = rank_object(program, files[source.body], source.parts)
        atomic_write_text(folder / f"rank{i}.json", _json(data))
    (folder / RUNTIME).mkdir(exist_ok=True)
    for module in (resources.files("shardopt.replay") / RUNTIME).iterdir():
        if module.name.endswith(".py"):
            text = module.read_text(encoding="utf-8")
            atomic_write_text(folder / RUNTIME / module.name, text)
    atomic_write_text(folder / "data.json", _json(_common(programs, jobs, indices)))
    return [*files.values()]


def _common(
    programs: Sequence[RankProgram], jobs: Sequence[TraceSet], indices: str
) -> dict[str, Any]:
    sizes = [size for job in jobs for execution in job.executions if (size := execution.world_size)]
    members = [rank for p in programs for rank in (p.rank, *(r for g in p.groups for r in g))]
    return {
        "schema": SCHEMA,
        "ranks": [program.rank for program in programs],
        "world_size": max(*sizes, 1 + max(members), 1),
        "indices": indices,
        "provenance": {
            "kineto": all(job.traces for job in jobs),
            "shardopt": __version__,
        },
    }


def rank_object(
    program: RankProgram, file: str, parts: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """Return the content of a rank's data file."""
    last = max((n for call in program.calls for n in (*call.reads(), *call.gives())), default=-1)
    return {
        "rank": program.rank,
        "program": file,
        "parts": parts,
        "tensors": last + 1,
        "groups": program.groups,
        "made": {
            str(number): _spec(spec, program.fills.get(number))
            for number, spec in program.made.items()
            if number <= last
        },
        "specs": {str(number): _form(spec) for number, spec in program.specs().items()},
        "calls": list(map(_call, program.calls)),
        "left_out": list(map(asdict, program.left_out)),
    }


def _spec(spec: TensorSpec, fill: Mapping[str, Any] | None) -> dict[str, Any]:
    entries = asdict(spec) | {"fill": fill}
    optional = ("offset", "host", "fill")
    return {name: value for name, value in entries.items() if value or name not in optional}


def _form(spec: TensorSpec) -> list[Any]:
    return [spec.shape, spec.strides, spec.dtype]


def _call(call: Call) -> dict[str, Any]:
    entries: dict[str, Any] = {
        "overload": call.overload,
        "reads": sorted(set(call.reads())),
        "gives": call.gives(),
        "outputs": nested(lambda spec: spec and _form(spec), call.specs),
    }
    entry: dict[str, Any] = {"op": call.op}
    if call.is_collective:  # ranks agree on these before they run
        entry |= {"arguments": list(map(_term, call.arguments)), "keywords": call.keywords}
    entry |= {name: value for name, value in entries.items() if value}
    if call.us is not None:
        entry["us"] = round(call.us, 3)
    if call.bytes is not None:
        entry["bytes"] = call.bytes
    return entry


def _term(term: Term) -> Any:
    """Return an argument as the program spells it."""
    if isinstance(term, tuple):
        return [_term(item) for item in term]
    if isinstance(term, Slot):
        return f"t[{term.number}]"
    return term.text if isinstance(term, Word) else term


def _json(data: Mapping[str, Any]) -> str:
    """Write JSON with a line a key, so that files can be compared."""
    lines = (f" {json.dumps(key)}: {json.dumps(value)}" for key, value in data.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


RESERVED = frozenset(
    {
        "t", "work", "torch", "Ops", "main", "cpu", "device", "stream", "ops", "float",
        "ITERATION", "forward", "backward",
    }
)  # fmt: skip
"""Names that a program uses."""
MAX_LINES = 120
"""Most lines of one function of a program."""
HEADER = '''"""One iteration, as {who} of a traced job ran it.

Written by `shardopt bench generate`; runs with torch alone:

    torchrun --nproc-per-node {ranks} benchmark.py --help

`t` holds tensors by number, `work` collectives under way. Tensors that no op gives are described
in rank*.json and made before the first iteration.
"""

import torch
from runtime.ops import Ops
from runtime.run import main
from runtime.settings import cpu, device, stream

ops = Ops()
'''


@dataclass(frozen=True)
class BenchmarkSource:
    """A rank's program as text.

    Args:
        body: the text after `HEADER`.
        parts: for each function its first call, and the one after its last.
    """

    body: str
    parts: tuple[tuple[int, int], ...]


def source_of(program: RankProgram) -> BenchmarkSource:
    """Write the source of a program: a function for each section of its annotations."""
    names: dict[str, str] = {}
    functions: list[tuple[tuple[str, ...], list[str]]] = []
    starts: list[int] = []
    collectives = 0
    for at, call in enumerate(program.calls):
        if not functions or functions[-1][0] != call.section or len(functions[-1][1]) >= MAX_LINES:
            functions.append((call.section, []))
            starts.append(at)
        lines = functions[-1][1]
        line = _line(call, names)
        if call.is_collective:
            line = f"work[{collectives}] = {line}"
            collectives += 1
        lines.append(line)
        if call.frees:
            lines.append(" = ".join(f"t[{n}]" for n in call.frees) + " = None")
        lines += [f"work[{nth}].wait()" for nth in call.waits]
    text = [*(f"{name} = {value}" for name, value in sorted(names.items())), "", ""]
    listed = []
    for at, (section, lines) in enumerate(functions):
        name = f"part_{at}_{_identifier(section[-1]).strip('_').lower() if section else 'part'}"
        text.append(f"def {name}(t, work):")
        title = " / ".join(section).replace("\\", "").replace('"', "'") or "not annotated"
        text += [f'    """{title}"""']
        text += [*(f"    {line}" for line in lines), "", ""]
        listed.append(f"    ({section!r}, {name}),")
    text += ["ITERATION = [", *listed, "]", "", 'if __name__ == "__main__":']
    text += ["    main(ITERATION, ops)", ""]
    return BenchmarkSource("\n".join(text), tuple(pairwise([*starts, len(program.calls)])))


def _identifier(text: str) -> str:
    return re.sub(r"\W+", "_", text, flags=re.ASCII)


def _line(call: Call, names: dict[str, str]) -> str:
    """Write the call of an op; definitions for the head of the program are added to `names`."""
    called, first = _name(call, names)
    arguments = [first] if first else []
    arguments += [_text(term) for term in call.arguments]
    arguments += [f"{name}={_text(term)}" for name, term in call.keywords.items()]
    expression = f"{called}({', '.join(arguments)})"
    return ", ".join(map(_place, call.outputs)) + f" = {expression}" if call.gives() else expression


def _place(output: object) -> str:
    if output is None:
        return "_"
    if isinstance(output, tuple):
        return f"[{', '.join(map(_place, output))}]" if any(map(flat, output)) else "_"
    return f"t[{output}]"


def _name(call: Call, names: dict[str, str]) -> tuple[str, str]:
    """Return the function that a line calls, and its first argument if it is not the op's."""
    if call.is_collective:
        identifier = _identifier(call.collective).strip("_")
        return _named(identifier, f"ops.collective({call.collective!r})", names), ""
    if call.op.startswith("backward of "):
        names["backward"] = "ops.backward"
        return "backward", ""
    overload = "" if call.overload == "default" else f"_{call.overload}"
    name = _named(_identifier(call.op) + overload, f"ops({call.op!r}, {call.overload!r})", names)
    if call.with_grad:
        names["forward"] = "ops.forward"
        return "forward", name
    return name, ""


def _named(identifier: str, value: str, names: dict[str, str]) -> str:
    """Define a name for an op that differs from all names of the program and of Python."""
    reserved = identifier in RESERVED or keyword.iskeyword(identifier)
    reserved = reserved or identifier.startswith(("__", "part_"))
    name = identifier if identifier.isidentifier() and not reserved else f"op_{identifier}"
    # an op may have the name of another with its overload
    while names.setdefault(name, value) != value:
        name += "_"
    return name


def _text(term: Term) -> str:
    return f"[{', '.join(map(_text, term))}]" if isinstance(term, tuple) else str(_term(term))
