"""A program of calls on numbered tensors: what a benchmark runs on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
    "bool": "bool",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "c10::Float8_e5m2": "float8_e5m2",
}
"""C++ type of a tensor's items -> name of torch's dtype."""
WITH_GRAD = "with grad"
"""Stands in `Call.collective` for an op whose backward function the program calls later."""
WHOLE = frozenset({"int64", "int32", "int16", "int8", "uint8", "bool"})


@dataclass(frozen=True)
class Slot:
    """A tensor in an argument, by its number."""

    number: int


@dataclass(frozen=True)
class Word:
    """Source text that stands as it is, such as ``torch.float32``."""

    text: str


@dataclass(frozen=True)
class Number:
    """A literal, which may differ between ranks."""

    value: int | float | bool


Term = Slot | Word | Number | None | tuple["Term", ...]


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor is like.

    Args:
        storage: tensors with one number share memory.
        offset: of its first element there.
        strides: in elements.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    storage: int
    offset: int = 0
    host: bool = False

    @property
    def extent(self) -> int:
        """Elements of its storage that it reaches, from the storage's start."""
        if 0 in self.shape:
            return self.offset
        spans = zip(self.shape, self.strides, strict=True)
        return self.offset + 1 + sum((size - 1) * step for size, step in spans)


@dataclass(frozen=True)
class Call:
    """An op, or a collective, with the numbers of what it takes and gives.

    Args:
        op: ``namespace::name``; of a backward function ``backward of`` the op.
        overload: of a collective and a backward function empty.
        outputs: numbers as the op returns them, nested for lists; None: not used.
        us: recorded time; None: not recorded.
        frees: numbers of tensors that nothing uses after it.
        node: id in the trace, which is not written; nor are `names`, those of the arguments.
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
    collective: str = ""
    names: tuple[str, ...] = ()

    def named(self) -> dict[str, Term]:
        """Its arguments by their names."""
        return dict(zip(self.names, self.arguments, strict=False)) | dict(self.keywords)

    @property
    def is_collective(self) -> bool:
        """Whether `torch.distributed` runs it."""
        return bool(self.collective) and self.collective != WITH_GRAD

    def reads(self) -> list[int]:
        """Numbers of the tensors that it takes."""
        return [n for term in (*self.arguments, *self.keywords.values()) for n in slots(term)]

    def gives(self) -> list[int]:
        """Numbers of the tensors that it makes."""
        return [n for output in self.outputs for n in flat(output)]

    def renumber(self, numbers: Mapping[int, int]) -> Call:
        """The call with other numbers for these tensors."""

        def moved(leaf: Any) -> Any:
            if isinstance(leaf, Slot):
                return Slot(numbers.get(leaf.number, leaf.number))
            return numbers.get(leaf, leaf) if type(leaf) is int else leaf

        return replace(
            self,
            arguments=nested(moved, self.arguments),
            keywords={name: nested(moved, term) for name, term in self.keywords.items()},
            outputs=nested(moved, self.outputs),
            frees=nested(moved, self.frees),
        )


@dataclass(frozen=True)
class LeftOut:
    """Something of the trace that is not replayed."""

    op: str
    reason: str
    us: float | None = None


@dataclass(frozen=True)
class RankProgram:
    """What one rank runs.

    Args:
        made: tensors that exist before the first op.
        fills: number -> what it holds (`shardopt.replay.program.values`).
        notes: what was done in place of what the trace lacks.
    """

    rank: int
    calls: list[Call]
    made: dict[int, TensorSpec]
    fills: dict[int, dict[str, Any]]
    left_out: list[LeftOut]
    notes: list[str]
    groups: list[tuple[int, ...]] = field(default_factory=list)

    def numbers(self) -> list[int]:
        """Of all tensors."""
        used = [n for call in self.calls for n in (*call.reads(), *call.gives())]
        return [*used, *self.made]

    def specs(self) -> dict[int, TensorSpec]:
        """What is known of each tensor."""
        found = dict(self.made)
        for call in self.calls:
            found.update(number_outputs(call.outputs, call.specs))
        return found


def nested(change: Callable[..., Any], of: Any, *others: Any) -> Any:
    """What `change` makes of a value, or of each in nested tuples.

    Args:
        others: further values for each, nested alike; None where there are none for all of a tuple.
    """
    if not isinstance(of, tuple):
        return change(of, *others)
    columns = [[None] * len(of) if other is None else other for other in others]
    return tuple(nested(change, *items) for items in zip(of, *columns, strict=False))


def leaves(of: Any) -> Iterator[Any]:
    """The values in nested tuples, in order."""
    if isinstance(of, tuple):
        for item in of:
            yield from leaves(item)
    else:
        yield of


def slots(term: Term) -> list[int]:
    """Numbers of the tensors in a term."""
    return [leaf.number for leaf in leaves(term) if isinstance(leaf, Slot)]


def flat(output: Any) -> list[int]:
    """Numbers of an output."""
    return [number for number in leaves(output) if number is not None]


def number_outputs(outputs: Any, of: Any) -> Iterator[tuple[int, Any]]:
    """Number of a tensor -> what is known of it.

    Args:
        outputs: numbers as `Call.outputs` has them, nested for lists.
        of: what is known of each, nested in the same way; None where nothing is.
    """
    for output, item in zip(outputs, of, strict=False):
        if isinstance(output, tuple):
            yield from number_outputs(output, item if isinstance(item, tuple) else ())
        elif output is not None and item is not None:
            yield output, item


def join_jobs(jobs: Sequence[Sequence[RankProgram]]) -> list[RankProgram]:
    """One program a rank that runs the jobs' programs in their order.

    Tensors of one job are none of another's.

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
    found = []
    for programs in zip(*jobs, strict=True):
        whole = RankProgram(programs[0].rank, [], {}, {}, [], [], [()])
        for program in programs:
            whole = _append(whole, program)
        found.append(whole)
    return found


def _append(whole: RankProgram, program: RankProgram) -> RankProgram:
    first, before = 1 + max(whole.numbers(), default=-1), len(whole.calls)
    stores = 1 + max((spec.storage for spec in whole.made.values()), default=-1)
    groups = [*whole.groups, *(group for group in program.groups if group not in whole.groups)]
    calls = []
    numbers = {n: n + first for n in program.numbers()}
    for call in program.calls:
        number = call.arguments[0] if call.op == "wait" else call.keywords.get("group")
        call = call.renumber(numbers)
        if isinstance(number, Number) and call.op == "wait":
            call = replace(call, arguments=(Number(int(number.value) + before),))
        elif isinstance(number, Number) and call.is_collective:
            group = Number(groups.index(program.groups[int(number.value)]))
            call = replace(call, keywords={**call.keywords, "group": group})
        calls.append(call)
    made = {n + first: replace(s, storage=s.storage + stores) for n, s in program.made.items()}
    return RankProgram(
        whole.rank,
        [*whole.calls, *calls],
        {**whole.made, **made},
        {**whole.fills, **{n + first: fill for n, fill in program.fills.items()}},
        [*whole.left_out, *program.left_out],
        [*whole.notes, *program.notes],
        groups,
    )
