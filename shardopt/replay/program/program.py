"""A program of calls on numbered tensors that a benchmark runs on one rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, cast

from predictor.errors import InputError

ITEMS = {
    "float": "float32",
    "double": "float64",
    "int": "int32",
    "long int": "int64",
    "long": "int64",
    "short int": "int16",
    "short": "int16",
    "signed char": "int8",
    "char": "int8",
    "unsigned char": "uint8",
    "byte": "uint8",
    "bool": "bool",
    "half": "float16",
    "bfloat16": "bfloat16",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "c10::Float8_e5m2": "float8_e5m2",
}
"""C++ type of a tensor's items, or its spelling in records of collectives -> torch's dtype."""
COLLECTIVES = "c10d::"
WHOLE = frozenset({"int64", "int32", "int16", "int8", "uint8", "bool"})


@dataclass(frozen=True)
class Slot:
    """A tensor in an argument, by its number."""

    number: int


@dataclass(frozen=True)
class Word:
    """Source text that stands as it is, such as ``torch.float32``."""

    text: str


Term = Slot | Word | int | float | bool | None | tuple["Term", ...]
"""An argument as a program spells it: a tensor, text, a literal, or a list of such."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape, type and place of a tensor.

    Args:
        storage: tensors with one number share memory.
        offset: position of its first element there.
        strides: in elements.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    storage: int
    offset: int = 0
    host: bool = False


@dataclass(frozen=True)
class Call:
    """An op, or a collective, with the numbers of its input and output tensors.

    Args:
        op: ``namespace::name``; for a backward function ``backward of`` the op.
        overload: empty for a collective and a backward function.
        outputs: numbers as the op returns them, nested for lists; None: not used.
        section: annotations around it, the outermost first.
        node: id in the trace, which is not written; nor are `names`, the names of the arguments.
        us: recorded time; None: not recorded.
        bytes: sent by this rank in a collective.
        frees: numbers of tensors that nothing uses after it.
        specs: of the outputs, nested as they are.
        with_grad: the program calls its backward function later.
        waits: collectives, counted from 0 in the program, that end before the next op starts.
    """

    op: str
    overload: str
    arguments: tuple[Term, ...]
    keywords: Mapping[str, Term]
    outputs: tuple[Any, ...]
    section: tuple[str, ...]
    node: int
    us: float | None = None
    bytes: int | None = None
    frees: tuple[int, ...] = ()
    specs: tuple[Any, ...] = ()
    with_grad: bool = False
    names: tuple[str, ...] = ()
    waits: tuple[int, ...] = ()

    def named(self) -> dict[str, Term]:
        """Return the arguments by their names."""
        return dict(zip(self.names, self.arguments, strict=False)) | dict(self.keywords)

    @property
    def is_collective(self) -> bool:
        """True if `torch.distributed` runs it."""
        return self.op.startswith(COLLECTIVES)

    @property
    def collective(self) -> str:
        """c10d's name of a collective; empty for an op."""
        return self.op.removeprefix(COLLECTIVES) if self.is_collective else ""

    @property
    def group(self) -> int:
        """Position of a collective's group among the program's groups."""
        return cast(int, self.keywords["group"])

    def reads(self) -> list[int]:
        """Return the numbers of the tensors that it takes."""
        return slots((*self.arguments, *self.keywords.values()))

    def gives(self) -> list[int]:
        """Return the numbers of the tensors that it makes."""
        return flat(self.outputs)

    def renumber(self, numbers: Mapping[int, int]) -> Call:
        """Return the call with other numbers for these tensors."""

        def number(leaf: Any) -> Any:
            return numbers.get(leaf, leaf)

        def term(leaf: Term) -> Term:
            return Slot(number(leaf.number)) if isinstance(leaf, Slot) else leaf

        return replace(
            self,
            arguments=nested(term, self.arguments),
            keywords={name: nested(term, argument) for name, argument in self.keywords.items()},
            outputs=nested(number, self.outputs),
            frees=nested(number, self.frees),
        )


@dataclass(frozen=True)
class LeftOut:
    """An op of the trace that is not replayed."""

    op: str
    reason: str
    us: float | None = None


@dataclass(frozen=True)
class RankProgram:
    """Program of one rank.

    Args:
        made: tensors that exist before the first op.
        fills: number of a tensor -> its values (`shardopt.replay.program.values`).
        notes: substitutes for data that the trace lacks.
    """

    rank: int
    calls: list[Call]
    made: dict[int, TensorSpec]
    fills: dict[int, dict[str, Any]]
    left_out: list[LeftOut]
    notes: list[str]
    groups: list[tuple[int, ...]] = field(default_factory=list)

    def numbers(self) -> list[int]:
        """Return the numbers of all tensors."""
        used = [n for call in self.calls for n in (*call.reads(), *call.gives())]
        return [*used, *self.made]

    def specs(self) -> dict[int, TensorSpec]:
        """Return the known specs, by number of the tensor."""
        specs = dict(self.made)
        for call in self.calls:
            specs.update(number_outputs(call.outputs, call.specs))
        return specs


def nested(change: Callable[[Any], Any], value: Any) -> Any:
    """Apply `change` to a value, or to each value in nested tuples."""
    if isinstance(value, tuple):
        return tuple(nested(change, item) for item in value)
    return change(value)


def leaves(value: Any) -> Iterator[Any]:
    """Yield the values in nested tuples, in order."""
    if isinstance(value, tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def slots(term: Term) -> list[int]:
    """Return the numbers of the tensors in a term."""
    return [leaf.number for leaf in leaves(term) if isinstance(leaf, Slot)]


def flat(output: Any) -> list[int]:
    """Return the numbers in an output."""
    return [number for number in leaves(output) if number is not None]


def number_outputs(outputs: Any, items: Any) -> Iterator[tuple[int, Any]]:
    """Yield the number of each output tensor with its item.

    Args:
        outputs: numbers as `Call.outputs` has them, nested for lists.
        items: such as specs, nested in the same way; None where unknown.
    """
    for output, item in zip(outputs, items, strict=False):
        if isinstance(output, tuple):
            yield from number_outputs(output, item if isinstance(item, tuple) else ())
        elif output is not None and item is not None:
            yield output, item


def free_when_dead(calls: Sequence[Call], up_front: Container[int]) -> list[Call]:
    """Let each call free the tensors of earlier ops that it is the last to use."""
    last = {n: at for at, call in enumerate(calls) for n in (*call.reads(), *call.gives())}
    frees: dict[int, list[int]] = defaultdict(list)
    for number, at in sorted(last.items()):
        if number not in up_front:
            frees[at].append(number)
    return [replace(call, frees=tuple(frees[at])) for at, call in enumerate(calls)]


def join_jobs(jobs: Sequence[Sequence[RankProgram]]) -> list[RankProgram]:
    """Join the jobs' programs into one a rank, which runs them in their order.

    The jobs share no tensors.

    Raises:
        InputError: the jobs have unlike ranks.
    """
    ranks = [[program.rank for program in job] for job in jobs]
    for other in ranks[1:]:
        if other != ranks[0]:
            raise InputError(
                f"one trace has ranks {ranks[0]}, another {other}; join traces of jobs with "
                "the same ranks",
                inputs=("join",),
            )
    return [
        reduce(_append, programs, RankProgram(programs[0].rank, [], {}, {}, [], [], [()]))
        for programs in zip(*jobs, strict=True)
    ]


def _append(whole: RankProgram, program: RankProgram) -> RankProgram:
    first = 1 + max(whole.numbers(), default=-1)
    stores = 1 + max((spec.storage for spec in whole.made.values()), default=-1)
    done = sum(call.is_collective for call in whole.calls)
    groups = [*whole.groups, *(group for group in program.groups if group not in whole.groups)]
    numbers = {n: n + first for n in program.numbers()}
    calls = []
    for call in program.calls:
        call = replace(call.renumber(numbers), waits=tuple(nth + done for nth in call.waits))
        if call.is_collective:
            group = groups.index(program.groups[call.group])
            call = replace(call, keywords={**call.keywords, "group": group})
        calls.append(call)
    up_front = {n + first: replace(s, storage=s.storage + stores) for n, s in program.made.items()}
    return RankProgram(
        whole.rank,
        [*whole.calls, *calls],
        {**whole.made, **up_front},
        {**whole.fills, **{n + first: fill for n, fill in program.fills.items()}},
        [*whole.left_out, *program.left_out],
        [*whole.notes, *program.notes],
        groups,
    )
