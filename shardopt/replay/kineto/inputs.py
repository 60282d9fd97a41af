"""What a Kineto trace says of an op's inputs, and which of PyTorch's schemas fits it.

Traces with shapes (``record_shapes=True``) have ``Input Dims`` and ``Input type``; since PyTorch
2.1 also ``Input Strides`` and ``Concrete Inputs``, the values of numbers and of lists of up to 30
of them (PyTorch `torch/csrc/profiler/collection.cpp`). All of an op's arguments are there, in the
order of its schema, those left to their defaults too.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Literal

from predictor.errors import InputError
from shardopt.replay.program.program import ITEMS
from shardopt.replay.program.schema import Parameter, Schema, parse_schema
from shardopt.replay.program.tensors import contiguous

Kind = Literal["tensor", "tensors", "number", "numbers", "other"]
WORDS: dict[str, Kind] = {
    "": "other",
    "Scalar": "number",
    "ScalarList": "numbers",
    "TensorList": "tensors",
    "GenericList": "other",
    "Other": "other",
}
LIBRARIES = {"fbgemm": "fbgemm_gpu", "torchvision": "torchvision", "c10d": "torch.distributed"}
"""Namespace of ops -> what registers them."""
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
    shapes: tuple[tuple[int, ...], ...] = ()
    strides: tuple[tuple[int, ...], ...] = ()
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


def _tensors(
    dims: Sequence[Any], strides: Any
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    shapes = tuple(map(_sizes, dims))
    steps = list(strides) if isinstance(strides, list) else []
    steps += [None] * (len(shapes) - len(steps))
    known = tuple(
        _sizes(step) if isinstance(step, list) and len(step) == len(shape) else contiguous(shape)
        for shape, step in zip(shapes, steps, strict=False)
    )
    for shape, step in zip(shapes, known, strict=True):
        count: int = prod(shape)
        reach = 1 + sum((n - 1) * s for n, s in zip(shape, step, strict=True))
        if count > MAX_ELEMENTS or (count and reach > MAX_ELEMENTS):
            raise UnreadableError("a tensor that fits into no memory")
    return shapes, known


def _sizes(given: Any) -> tuple[int, ...]:
    whole = isinstance(given, list) and len(given) <= MAX_DIMS
    if not whole or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in given):
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

    library = LIBRARIES.get(name.partition("::")[0])
    if library is not None:
        with suppress(ImportError, OSError):
            importlib.import_module(library)
    found = []
    if not name.isascii():  # C++ takes no other name
        return ()
    for schema in torch._C._jit_get_schemas_for_operator(name):
        with suppress(InputError):
            made = parse_schema(str(schema))
            if not _is_for_scripts(made):
                found.append(made)
    return tuple(found)


@lru_cache(maxsize=4096)
def text_of(name: str, overload: str) -> str:
    """A schema as PyTorch spells it."""
    import torch

    every = map(str, torch._C._jit_get_schemas_for_operator(name))
    return next(text for text in every if (parse_schema(text).overload) == overload)


def _is_for_scripts(schema: Schema) -> bool:
    """Overloads that only TorchScript has, or that name dimensions."""
    hidden = "hacked_twin" in schema.overload or schema.overload.startswith("prim")
    return hidden or any("Dimname" in p.type for p in schema.parameters)


def fitting(name: str, inputs: Sequence[Input]) -> Schema | None:
    """The schema whose parameters can take these inputs; the closest where several can."""
    scored = [(_score(schema, inputs), -i) for i, schema in enumerate(schemas(name))]
    best = max(((s, i) for s, i in scored if s is not None), default=None)
    return None if best is None else schemas(name)[-best[1]]


def _score(schema: Schema, inputs: Sequence[Input]) -> int | None:
    extra = schema.parameters[len(inputs) :]
    if len(inputs) > len(schema.parameters) or any(p.default is None for p in extra):
        return None
    total = -len(extra)
    for parameter, given in zip(schema.parameters, inputs, strict=False):
        score = _closeness(parameter, given)
        if score is None:
            return None
        total += score
    return total


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
        if "[" not in base or item not in NUMBERS:
            return None
        first = given.value[0] if given.value else None
        return _number_closeness(item, first)
    # the trace says as much of None as of texts, devices and lists
    return 1 if parameter.type.endswith("?") or base == "Tensor" else 0


def _number_closeness(base: str, value: Any) -> int | None:
    kinds = NUMBERS.get(base)
    if kinds is None:
        return None
    if value is None:
        return 1
    if isinstance(value, bool) and bool not in kinds:
        return None
    return 3 - kinds.index(type(value)) if type(value) in kinds else None
