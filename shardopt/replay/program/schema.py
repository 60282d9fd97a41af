"""Op schemas as execution traces spell them: arguments in order, with type and kind."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from string import ascii_letters
from typing import Any

from predictor.errors import InputError
from predictor.trace.execution import Argument, Node, Tensor
from shardopt.replay.program.program import ITEMS, Term, Word

HEAD = re.compile(r"([A-Za-z_]\w*::\w+)(?:\.(\w+))?\((.*)\)\s*->\s*(.*)$", re.ASCII)
ARGUMENT = re.compile(r"(.+?)\s+([A-Za-z_]\w*)(?:=.*)?$", re.ASCII)
ALIAS = re.compile(r"\([\w\s!|*>-]*\)")
LONGEST = 20_000
"""Characters of a schema; those of FBGEMM have 3,000."""
OPENING, CLOSING = "([", ")]"
LIBRARIES = {"fbgemm": "fbgemm_gpu", "torchvision": "torchvision", "c10d": "torch.distributed"}
"""Namespace of ops -> module that registers them."""


@dataclass(frozen=True)
class Parameter:
    """One argument of an op.

    Args:
        type: without alias marks, such as ``Tensor``, ``SymInt[]`` or ``ScalarType?``.
        keyword: passed by name only.
        written: the op changes it.
    """

    name: str
    type: str
    keyword: bool
    written: bool

    @property
    def base(self) -> str:
        """The type without ``?``."""
        return self.type.removesuffix("?")


@dataclass(frozen=True)
class Schema:
    """Name and parameters of an op.

    Args:
        name: ``namespace::op``.
        overload: ``default`` where the schema names none.
    """

    name: str
    overload: str
    parameters: tuple[Parameter, ...]


@lru_cache(maxsize=4096)
def parse_schema(text: str) -> Schema:
    """Read the schema of an op.

    Raises:
        InputError: the text is no schema.
    """
    match = HEAD.match(text) if len(text) <= LONGEST else None
    parts = _split(match[3]) if match else []
    fields = [ARGUMENT.match(part) for part in parts if part != "*"]
    if match is None or None in fields:
        raise InputError("not the schema of an op")
    first_keyword = parts.index("*") if "*" in parts else len(parts)
    parameters = tuple(
        Parameter(field[2], ALIAS.sub("", field[1]), at >= first_keyword, "!" in field[1])
        for at, field in enumerate(fields)
        if field
    )
    return Schema(match[1], match[2] or "default", parameters)


def _split(text: str) -> list[str]:
    """Split a text at the commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        if character in OPENING:
            depth += 1
        elif character in CLOSING:
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def ops_of(words: str) -> frozenset[str]:
    """Return the ops of a namespace; the namespace is the first word."""
    space, *names = words.split()
    return frozenset(f"{space}::{name}" for name in names)


def load_library(op: str) -> None:
    """Import the library that registers an op, if it is installed."""
    library = LIBRARIES.get(op.partition("::")[0])
    if library is not None:
        with suppress(ImportError, OSError):
            importlib.import_module(library)


def find_op(name: str, overload: str) -> Any:
    """Return the op of PyTorch's dispatcher; None if it is not installed."""
    import torch

    space, _, op = name.partition("::")
    load_library(name)
    overload_op = getattr(getattr(getattr(torch.ops, space, None), op, None), overload, None)
    return overload_op if isinstance(overload_op, torch._ops.OpOverload) else None


def has_kernel(op: str, key: str) -> bool:
    """Return True if an op, with its overload if any, is registered under a dispatch key."""
    import torch

    if not op.isascii():  # C++ takes no other name
        return False
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op, key))
    except RuntimeError:
        return False


DTYPES = {
    0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "float16", 6: "float32",
    7: "float64", 9: "complex64", 10: "complex128", 11: "bool", 15: "bfloat16",
    23: "float8_e5m2", 24: "float8_e4m3fn",
}  # fmt: skip
"""c10's `ScalarType`."""
LAYOUTS = {0: "strided", 1: "sparse_coo", 2: "sparse_csr"}
FORMATS = {0: "contiguous_format", 1: "preserve_format", 2: "channels_last", 3: "channels_last_3d"}
WORDS = frozenset(
    {
        "sum", "mean", "max", "min", "amax", "amin", "prod", "add", "none", "tanh", "same", "valid",
        "constant", "reflect", "replicate", "circular", "ij", "xy", "floor", "trunc", "left",
        "right", "linear", "multiply", "assign", "forward", "backward", "ortho",
    }
)  # fmt: skip
"""Texts that ops of PyTorch take."""
EQUATION = re.compile(r"[A-Za-z. ]*(?:,[A-Za-z. ]*)*->[A-Za-z. ]*")
"""Equation of `aten::einsum`."""
SIZED = frozenset({"aten::arange", "aten::range", "aten::linspace", "aten::constant_pad_nd"})
"""Ops whose ``Scalar`` arguments are sizes."""
MAX_SCALAR = 4096
DEVICE, HOST, STREAM = Word("device"), Word("cpu"), Word("stream")


class UnwritableError(Exception):
    """The trace does not hold a value; the message names it."""


def literal(value: Any, parameter: Parameter, op: str) -> Term:
    """Return the value of an argument that is no tensor.

    Raises:
        UnwritableError: the trace has only ``<Object>``, or a type that cannot be read back.
    """
    if value is None:
        return None
    convert = CONVERTERS.get(parameter.base)
    if convert is not None:
        return convert(value)
    if parameter.base == "Scalar":
        return _scalar(value, op)
    if isinstance(value, str):
        raise UnwritableError(
            f"`{parameter.name}` is a {parameter.base}, which the trace does not hold"
        )
    if isinstance(value, tuple):
        return tuple(literal(item, parameter, op) for item in value)
    if isinstance(value, Tensor):
        raise UnwritableError(f"`{parameter.name}` is a tensor where its schema has none")
    if isinstance(value, float) and not math.isfinite(value):
        return Word(f'float("{value}")')
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        raise UnwritableError(f"`{parameter.name}` is a number of more than 64 bits")
    number: int | float = value
    return number


def _scalar(value: Any, op: str) -> int | float | bool:
    if not isinstance(value, (bool, int, float)):
        raise UnwritableError("a scalar that the trace does not hold")
    if isinstance(value, bool) or op in SIZED:
        return value
    if isinstance(value, int):
        return value if abs(value) <= MAX_SCALAR else int(math.copysign(1, value))
    if "fill" in op or "full" in op or op == "aten::scalar_tensor":
        return float(f"{value:.0e}") if math.isfinite(value) else 0.0
    return value if math.isfinite(value) else 0.0


def _enumeration(names: dict[int, str]) -> Callable[[Any], Word]:
    def convert(value: Any) -> Word:
        if not isinstance(value, int) or value not in names:
            raise UnwritableError("an enumeration with a value that is not known")
        return Word(f"torch.{names[value]}")

    return convert


def _device(value: Any) -> Word:
    return HOST if str(value).startswith("cpu") else DEVICE


def _text(value: Any) -> Word:
    if isinstance(value, str) and EQUATION.fullmatch(value):
        return Word(repr(_rename_letters(value)))
    if not isinstance(value, str) or value not in WORDS:
        raise UnwritableError("a text that is none of the words that ops of PyTorch take")
    return Word(repr(value))


def _rename_letters(equation: str) -> str:
    """Rename the letters of an equation to a, b, c, ...: only its structure is written."""
    letters = dict.fromkeys(c for c in equation if c.isalpha())
    names = dict(zip(letters, ascii_letters, strict=False))
    return "".join(names.get(c, c) for c in equation if c != " ")


CONVERTERS: dict[str, Callable[[Any], Word]] = {
    "ScalarType": _enumeration(DTYPES),
    "Layout": _enumeration(LAYOUTS),
    "MemoryFormat": _enumeration(FORMATS),
    "Device": _device,
    "str": _text,
    "Stream": lambda _: STREAM,
}


PLAIN = {"int64": 1, "float64": 1.0, "bool": True}
"""Substitute for a Python number, by the type of the tensor that PyTorch makes of it."""
NAMES = frozenset({"other", "exponent"})
"""Arguments that may be Python numbers where the schema says ``Tensor``."""


def python_number(parameter: Parameter, argument: Argument) -> int | float | None:
    """Return the substitute for a Python number that an op takes as a tensor; None for others."""
    if parameter.name not in NAMES or parameter.written or parameter.base != "Tensor":
        return None
    value = argument.value
    if not isinstance(value, Tensor) or argument.shape or value.device not in ("cpu", ""):
        return None
    dtype = ITEMS.get(argument.type.removeprefix("Tensor(").removesuffix(")"), "")
    return PLAIN.get(dtype)


def read_by(node: Node) -> Iterator[Argument]:
    """Yield the inputs of an op that are no Python numbers."""
    try:
        parameters = parse_schema(node.schema).parameters
    except InputError:
        parameters = ()
    for i, argument in enumerate(node.inputs):
        if i >= len(parameters) or python_number(parameters[i], argument) is None:
            yield argument
