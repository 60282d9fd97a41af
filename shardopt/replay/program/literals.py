"""Values of arguments as source text, and what is kept of them.

Numbers and enumerations of an op's schema are structure and stay. Texts stay if they are one of a
few words that ops know; large whole numbers where a schema says ``Scalar`` may be ids of users, and
constants that fill tensors may be data: neither is kept as it was.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from string import ascii_letters
from typing import Any

from predictor.errors import InputError
from predictor.trace.execution import Argument, Node, Tensor
from shardopt.replay.program.program import ITEMS, Number, Term, Word
from shardopt.replay.program.schema import Parameter, parse_schema

DTYPES = {
    0: "uint8", 1: "int8", 2: "int16", 3: "int32", 4: "int64", 5: "float16", 6: "float32",
    7: "float64", 9: "complex64", 10: "complex128", 11: "bool", 15: "bfloat16",
    23: "float8_e5m2", 24: "float8_e4m3fn",
}  # fmt: skip
"""c10's `ScalarType`."""
LAYOUTS = {0: "strided", 1: "sparse_coo", 2: "sparse_csr"}
FORMATS = {0: "contiguous_format", 1: "preserve_format", 2: "channels_last", 3: "channels_last_3d"}
TORCH = frozenset({*DTYPES.values(), *LAYOUTS.values(), *FORMATS.values()})
NOT_FINITE = re.compile(r'float\("(-?inf|nan)"\)')
WORDS = frozenset(
    {
        "sum", "mean", "max", "min", "amax", "amin", "prod", "add", "none", "tanh", "same", "valid",
        "constant", "reflect", "replicate", "circular", "ij", "xy", "floor", "trunc", "left",
        "right", "linear", "multiply", "assign", "forward", "backward", "ortho",
    }
)  # fmt: skip
"""Texts that ops of PyTorch take."""
EQUATION = re.compile(r"[A-Za-z. ]*(?:,[A-Za-z. ]*)*->[A-Za-z. ]*")
"""What `aten::einsum` takes."""
SIZED = frozenset({"aten::arange", "aten::range", "aten::linspace", "aten::constant_pad_nd"})
"""Ops whose ``Scalar`` arguments are sizes."""
MAX_SCALAR = 4096
DEVICE, HOST, STREAM = Word("device"), Word("cpu"), Word("stream")


class UnwritableError(Exception):
    """The trace does not hold the value; says what it is."""


def literal(value: Any, parameter: Parameter, op: str) -> Term:
    """The value of an argument that is no tensor.

    Raises:
        UnwritableError: the trace has only ``<Object>`` or a type that it cannot be read back from.
    """
    if value is None:
        return None
    convert = CONVERTERS.get(parameter.base)
    if convert is not None:
        return convert(value)
    if parameter.base == "Scalar":
        return Number(_scalar(value, op))
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
    return Number(value)


def word_value(text: str) -> Any:
    """What a `Word` stands for on a CPU.

    Raises:
        ValueError: it is no word that `literal` writes.
    """
    import torch

    if text in (DEVICE.text, HOST.text):
        return torch.device("cpu")
    if text == STREAM.text:
        return None
    if text.startswith("torch.") and text.removeprefix("torch.") in TORCH:
        return getattr(torch, text.removeprefix("torch."))
    if (match := NOT_FINITE.fullmatch(text)) is not None:
        return float(match[1])
    inner = text[1:-1]
    if text == repr(inner) and (inner in WORDS or EQUATION.fullmatch(inner)):
        return inner
    raise ValueError(f"{text!r:.40} is no word that ops take")


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
    """An equation with its letters in the order of the alphabet: no more than its structure."""
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
"""What stands for a Python number, by the type of the tensor that PyTorch makes of it."""
NAMES = frozenset({"other", "exponent"})
"""Arguments that may be Python numbers where the schema says ``Tensor``."""


def python_number(parameter: Parameter, argument: Argument) -> Number | None:
    """What stands for a Python number that an op takes as a tensor; None if it is no such."""
    if parameter.name not in NAMES or parameter.written or parameter.base != "Tensor":
        return None
    value = argument.value
    if not isinstance(value, Tensor) or argument.shape or value.device not in ("cpu", ""):
        return None
    dtype = ITEMS.get(argument.type.removeprefix("Tensor(").removesuffix(")"), "")
    return Number(PLAIN[dtype]) if dtype in PLAIN else None


def read_by(node: Node) -> Iterator[Argument]:
    """The inputs of an op that are no Python numbers."""
    try:
        parameters = parse_schema(node.schema).parameters
    except InputError:
        parameters = ()
    for i, argument in enumerate(node.inputs):
        if i >= len(parameters) or python_number(parameters[i], argument) is None:
            yield argument
