"""Programs as Python source: one readable line a call, a function a part of the iteration."""

from __future__ import annotations

import keyword
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardopt.replay.program.program import (
    WITH_GRAD,
    Call,
    Number,
    RankProgram,
    Slot,
    Term,
    Word,
    flat,
)

RESERVED = frozenset(
    {
        "t", "c", "work", "torch", "Ops", "main", "cpu", "device", "stream", "ops", "float",
        "ITERATION", "forward", "backward",
    }
)  # fmt: skip
"""Names that a program uses."""
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
class Line:
    """A line of source with the numbers in it that may differ between ranks.

    Args:
        parts: text and numbers in turn.
    """

    parts: tuple[str | Number, ...]

    @property
    def pattern(self) -> tuple[str | type, ...]:
        """The line without its numbers."""
        return tuple(part if isinstance(part, str) else type(part.value) for part in self.parts)

    @property
    def numbers(self) -> list[int | float | bool]:
        """The numbers in it."""
        return [part.value for part in self.parts if isinstance(part, Number)]


@dataclass(frozen=True)
class Source:
    """A rank's program as lines.

    Args:
        imports: lines that name the ops.
        sections: annotations, and lines of a function.
        parts: of a section: its first call, and the one after its last.
    """

    imports: tuple[str, ...]
    sections: tuple[tuple[tuple[str, ...], tuple[Line, ...]], ...]
    parts: tuple[tuple[int, int], ...]

    @property
    def pattern(self) -> object:
        """Ranks with one pattern share a file."""
        lines = tuple(
            (names, tuple(line.pattern for line in body)) for names, body in self.sections
        )
        return self.imports, lines

    @property
    def numbers(self) -> list[int | float | bool]:
        """All numbers in order."""
        return [n for _, body in self.sections for line in body for n in line.numbers]


def source_of(program: RankProgram) -> Source:
    """The lines of a program."""
    names: dict[str, str] = {}
    sections: list[tuple[tuple[str, ...], list[Line]]] = []
    works: dict[int, int] = {}
    parts: list[list[int]] = []
    count = 0
    for at, call in enumerate(program.calls):
        if not sections or sections[-1][0] != call.section or len(sections[-1][1]) >= MAX_CALLS:
            sections.append((call.section, []))
            parts.append([count, count])
        count += call.op != "wait"
        parts[-1][1] = count
        if call.is_collective:
            works[at] = len(works)
        sections[-1][1].extend(_lines(call, names, works))
    imports = tuple(f"{name} = {made}" for name, made in sorted(names.items()))
    made = tuple((name, tuple(lines)) for name, lines in sections)
    return Source(imports, made, tuple((first, last) for first, last in parts))


def file_of(source: Source, varying: dict[int, int], title: str, ranks: int) -> str:
    """A whole file.

    Args:
        varying: position of a number -> its place in `c`.
    """
    text = [HEADER.format(title=title, ranks=ranks), *source.imports, "", ""]
    position = 0
    listed = []
    for at, (names, body) in enumerate(source.sections):
        text.append(f"def {_function(at, names)}(t, c, work):")
        text += [f'    """{_quote(" / ".join(names) or "not annotated")}"""']
        for line in body:
            written = []
            for part in line.parts:
                if isinstance(part, str):
                    written.append(part)
                    continue
                place = varying.get(position)
                written.append(repr(part.value) if place is None else f"c[{place}]")
                position += 1
            text.append("    " + "".join(written))
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


def _lines(call: Call, names: dict[str, str], works: dict[int, int]) -> Iterator[Line]:
    if call.op == "wait":
        target = call.arguments[0]
        if isinstance(target, Number) and int(target.value) in works:
            yield Line((f"work[{works[int(target.value)]}].wait()",))
        return
    parts: list[str | Number] = [_target(call)]
    called, first = _name(call, names)
    parts.append(f"{called}({first}")
    rest = [(f"{name}=" if name else "", term) for name, term in _terms(call)]
    for i, (name, term) in enumerate(rest):
        parts.append((", " if i or first else "") + name)
        parts.extend(_write_term(term))
    parts.append(")" if not call.is_collective else "))")
    yield Line(tuple(parts))
    if call.frees:
        yield Line((" = ".join(f"t[{n}]" for n in call.frees) + " = None",))


def _terms(call: Call) -> list[tuple[str, Term]]:
    return [("", term) for term in call.arguments] + list(call.keywords.items())


def _target(call: Call) -> str:
    if call.is_collective:
        return "work.append("
    if not any(flat(output) for output in call.outputs):
        return ""
    if len(call.outputs) == 1:
        only = call.outputs[0]
        if isinstance(only, tuple):
            return f"[{', '.join(map(_place, only))}] = "
        return f"t[{only}] = "
    return ", ".join(map(_place, call.outputs)) + " = "


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


def _write_term(term: Term) -> Iterator[str | Number]:
    if term is None:
        yield "None"
    elif isinstance(term, Slot):
        yield f"t[{term.number}]"
    elif isinstance(term, Word):
        yield term.text
    elif isinstance(term, Number):
        yield term
    else:
        yield "["
        for i, item in enumerate(term):
            if i:
                yield ", "
            yield from _write_term(item)
        yield "]"
