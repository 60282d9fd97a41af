"""What a Kineto trace says of an op's inputs, and which of PyTorch's schemas fits it.

Traces with shapes (``record_shapes=True``) have ``Input Dims`` and ``Input type``; since PyTorch
2.1 also ``Input Strides`` and ``Concrete Inputs``, the values of numbers and of lists of up to 30
of them (PyTorch `torch/csrc/profiler/collection.cpp`). All of an op's arguments are there, in the
order of its schema, those left to their defaults too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, Literal

from predictor.errors import InputError
from shardopt.replay.program.program import ITEMS
from shardopt.replay.program.schema import Parameter, Schema, load_library, ops_of, parse_schema
from shardopt.replay.program.tensors import contiguous

Kind = Literal["tensor", "tensors", "number", "numbers", "other"]
Shape = tuple[int, ...]
WORDS: dict[str, Kind] = {
    "": "other",
    "Scalar": "number",
    "ScalarList": "numbers",
    "TensorList": "tensors",
    "GenericList": "other",
    "Other": "other",
}
MAX_ELEMENTS = 1 << 40
MAX_DIMS = 64
NUMBERS = {
    "int": (int,),
    "SymInt": (int,),
    "ScalarType": (int,),
    "Layout": (int,),
    "MemoryFormat": (int,),
    "bool": (bool,),
    "float": (float, int),
    "Scalar": (float, int, bool),
}
"""Type of a schema -> what its numbers are in a trace."""


@dataclass(frozen=True, slots=True)
class Input:
    """One input of an op.

    Args:
        kind: ``other`` is None, or something that the trace says nothing of.
        dtype: of a tensor as C++ spells it; of lists the trace does not say it.
        shapes, strides: of the tensors; strides are those of adjacent elements where not recorded.
        value: of numbers; None: not recorded.
    """

    kind: Kind
    dtype: str = ""
    shapes: tuple[Shape, ...] = ()
    strides: tuple[Shape, ...] = ()
    value: Any = None


class UnreadableError(Exception):
    """What a trace says of an op's inputs makes no sense; says what."""


def read_inputs(args: Mapping[str, Any]) -> tuple[Input, ...] | None:
    """The inputs of an op; None where the trace has no shapes.

    Raises:
        UnreadableError: lists of unlike lengths, or sizes that no tensor has.
    """
    dims = args.get("Input Dims", args.get("Input dims"))
    types = args.get("Input type")
    if dims is None or types is None:
        return None
    count = len(dims) if isinstance(dims, list) else -1
    strides = args.get("Input Strides") or [None] * count
    values = args.get("Concrete Inputs") or [None] * count
    lists = (dims, types, strides, values)
    if any(not isinstance(x, list) or len(x) != count for x in lists):
        raise UnreadableError("its recorded shapes, types and values do not go together")
    return tuple(_input(*item) for item in zip(*lists, strict=True))


def _input(dims: Any, word: Any, strides: Any, value: Any) -> Input:
    kind = WORDS.get(word, "tensor") if isinstance(word, str) else "other"
    if kind == "tensor":
        if word not in ITEMS:
            raise UnreadableError("a tensor of a type that is not known")
        return Input(kind, word, *_tensors([dims], [strides]))
    if kind == "tensors":
        listed = isinstance(dims, list) and all(isinstance(d, list) for d in dims)
        return Input(kind, "", *_tensors(dims if listed else [], strides))
    return Input(kind, value=value_of(value) if kind != "other" else None)


def _tensors(dims: Sequence[Any], strides: Any) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
    """Shapes and strides, those of adjacent elements where the trace has none that fit."""
    shapes, steps = [], []
    for at, given in enumerate(dims):
        shape = _sizes(given)
        step = strides[at] if isinstance(strides, list) and at < len(strides) else None
        fits = isinstance(step, list) and len(step) == len(shape)
        known = _sizes(step) if fits else contiguous(shape)
        reach = 1 + sum((n - 1) * s for n, s in zip(shape, known, strict=True))
        count: int = prod(shape)
        if count > MAX_ELEMENTS or (count and reach > MAX_ELEMENTS):
            raise UnreadableError("a tensor that fits into no memory")
        shapes.append(shape)
        steps.append(known)
    return tuple(shapes), tuple(steps)


def _sizes(given: Any) -> Shape:
    whole = isinstance(given, list) and len(given) <= MAX_DIMS
    if not whole or any(type(n) is not int or n < 0 for n in given):
        raise UnreadableError("sizes that no tensor has")
    return tuple(given)


def value_of(text: Any) -> Any:
    """Of a number or of a list of them; None if it is neither."""
    if not isinstance(text, str) or not text:
        return None
    if text.startswith("["):
        inner = text.strip("[]").strip()
        items = [value_of(part.strip()) for part in inner.split(",")] if inner else []
        return None if None in items else tuple(items)
    if text in ("True", "False"):
        return text == "True"
    for convert in (int, float):
        with suppress(ValueError):
            return convert(text)
    return None


@lru_cache(maxsize=4096)
def schemas(name: str) -> tuple[Schema, ...]:
    """PyTorch's schemas of an op that a program can call."""
    import torch

    load_library(name)
    found: list[Schema] = []
    if not name.isascii():  # C++ takes no other name
        return ()
    for text in map(str, torch._C._jit_get_schemas_for_operator(name)):
        with suppress(InputError):
            made = parse_schema(text)
            # overloads that only TorchScript has, or that name dimensions
            hidden = "hacked_twin" in made.overload or made.overload.startswith("prim")
            if not hidden and not any("Dimname" in p.type for p in made.parameters):
                found.append(made)
    return tuple(dict.fromkeys(found))


def fitting(name: str, inputs: Sequence[Input]) -> Schema | None:
    """The schema whose parameters can take these inputs; the closest where several can."""
    scored = [(_score(schema, inputs), -i) for i, schema in enumerate(schemas(name))]
    best = max(((s, i) for s, i in scored if s is not None), default=None)
    return None if best is None else schemas(name)[-best[1]]


def _score(schema: Schema, inputs: Sequence[Input]) -> int | None:
    extra = schema.parameters[len(inputs) :]
    if len(inputs) > len(schema.parameters) or any(p.default is None for p in extra):
        return None
    scores = [_closeness(p, given) for p, given in zip(schema.parameters, inputs, strict=False)]
    known = [score for score in scores if score is not None]
    return sum(known) - len(extra) if len(known) == len(scores) else None


def _closeness(parameter: Parameter, given: Input) -> int | None:
    """None: the parameter cannot take it."""
    base = parameter.base
    if given.kind == "tensor":
        return 2 if base == "Tensor" else None
    if given.kind == "tensors":
        return 2 if base in ("Tensor[]", "Tensor?[]") else None
    if given.kind == "number":
        return _number_closeness(base, given.value)
    if given.kind == "numbers":
        item = base.partition("[")[0]
        first = given.value[0] if given.value else None
        return _number_closeness(item, first) if "[" in base else None
    # the trace says as much of None as of texts, devices and lists
    return 1 if parameter.type.endswith("?") or base == "Tensor" else 0


def _number_closeness(base: str, value: Any) -> int | None:
    kinds = NUMBERS.get(base)
    if kinds is None or value is None:
        return None if kinds is None else 1
    return 3 - kinds.index(type(value)) if type(value) in kinds else None


@dataclass
class Autograd:
    """What a trace shows of an op at its backward function, or of a function at its op.

    Args:
        inputs: shapes of the tensors that the op took.
        gradient: shape of its output; None: not known.
    """

    inputs: set[Shape] = field(default_factory=set)
    gradient: Shape | None = None


Named = Mapping[str, Input]
MASK = re.compile(r"bool\[(\d)\]")
ALONG_ALL = ops_of("aten gather scatter scatter_ scatter_add scatter_add_")
"""Ops whose index has the shape of their tensor in all dimensions but one."""
ALONG_ONE = ops_of("aten index_add index_add_ index_copy index_copy_")
"""Ops whose source has the shape of their tensor in all dimensions but one."""
NORMS = ops_of("aten layer_norm native_layer_norm native_layer_norm_backward")


def derive_value(op: str, parameter: str, kind: str, named: Named, other: Autograd) -> Any:
    """The value of an argument; None: the shapes leave it open.

    Args:
        kind: type of the parameter in the schema.
        other: of an op in a backward function, what the forward op took; else what it gave.
    """
    mask = MASK.match(kind)
    if mask is not None:
        # autograd asks for all gradients but of inputs that need none
        return (True,) * int(mask[1])
    whole = _first(named, "self")
    if parameter == "dim" and kind == "int" and whole is not None:
        return _dim(op, whole, named)
    if (op, parameter) == ("aten::sum", "dim") and whole is not None:
        return _summed_dims(whole, other)
    if op in NORMS and parameter == "normalized_shape":
        weight = _first(named, "weight")
        return _first(named, "bias") if weight is None else weight
    return None


def _first(named: Named, name: str) -> Shape | None:
    given = named.get(name)
    return given.shapes[0] if given is not None and given.shapes else None


def _dim(op: str, whole: Shape, named: Named) -> int | None:
    """The dimension along which an index counts: the one where shapes differ."""
    if len(whole) <= 1:
        return 0
    index, source = _first(named, "index"), _first(named, "source")
    if op in ALONG_ALL and index is not None and len(index) == len(whole):
        return _only(d for d in range(len(whole)) if index[d] != whole[d])
    if op in ALONG_ONE and index is not None and source is not None and len(source) == len(whole):
        count = index[0] if index else 1
        fits = (d for d in range(len(whole)) if _without(whole, d) == _without(source, d))
        return _only(d for d in fits if source[d] == count)
    return None


def _only(found: Iterable[int]) -> int | None:
    listed = list(found)
    return listed[0] if len(listed) == 1 else None


def _without(shape: Shape, dim: int) -> Shape:
    return shape[:dim] + shape[dim + 1 :]


def _summed_dims(whole: Shape, other: Autograd) -> Shape | None:
    """A gradient is summed down to the shape of an input that was expanded."""
    if len(whole) <= 1:
        return tuple(range(len(whole)))
    result = other.gradient
    if result is None or result == whole:
        ways = {dims for shape in other.inputs if (dims := _expanded_dims(shape, whole))}
        return ways.pop() if len(ways) == 1 else None
    if len(result) == len(whole):
        return tuple(d for d, size in enumerate(whole) if size != result[d]) or None
    only = _only(d for d in range(len(whole)) if _without(whole, d) == result)
    return None if only is None else (only,)


def _expanded_dims(shape: Shape, whole: Shape) -> Shape | None:
    """Along which dimensions a shape was expanded; None if it cannot become the other."""
    more = len(whole) - len(shape)
    if more < 0:
        return None
    pairs = list(zip(shape, whole[more:], strict=True))
    if any(size not in (1, other) for size, other in pairs):
        return None
    grown = tuple(more + d for d, (size, other) in enumerate(pairs) if size != other)
    return (*range(more), *grown)
