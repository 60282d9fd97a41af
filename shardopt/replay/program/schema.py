"""Op schemas as execution traces spell them: arguments in order, with type and kind."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from predictor.errors import InputError

HEAD = re.compile(r"([A-Za-z_]\w*::\w+)(?:\.(\w+))?\((.*)\)\s*->\s*(.*)$", re.ASCII)
ARGUMENT = re.compile(r"(.+?)\s+([A-Za-z_]\w*)(?:=(.*))?$", re.ASCII)
ALIAS = re.compile(r"\([\w\s!|*>-]*\)")
LONGEST = 20_000
"""Characters of a schema; those of FBGEMM have 3,000."""
OPENING, CLOSING = "([", ")]"


@dataclass(frozen=True)
class Parameter:
    """One argument of an op.

    Args:
        type: without alias marks, such as ``Tensor``, ``SymInt[]`` or ``ScalarType?``.
        keyword: it is given by name only.
        default: as the schema spells it; None without one.
        written: the op changes it.
    """

    name: str
    type: str
    keyword: bool
    default: str | None
    written: bool

    @property
    def base(self) -> str:
        """The type without ``?``."""
        return self.type.removesuffix("?")


@dataclass(frozen=True)
class Schema:
    """What an op takes and returns.

    Args:
        name: ``namespace::op``.
        overload: ``default`` where the schema names none.
        returns: types without alias marks.
    """

    name: str
    overload: str
    parameters: tuple[Parameter, ...]
    returns: tuple[str, ...]


@lru_cache(maxsize=4096)
def parse_schema(text: str) -> Schema:
    """Read the schema of an op.

    Raises:
        InputError: the text is no schema.
    """
    match = HEAD.match(text) if len(text) <= LONGEST else None
    if match is None:
        raise InputError("not the schema of an op")
    name, overload, arguments, returns = match.groups()
    parameters = []
    keyword = False
    for part in _split(arguments):
        if part == "*":
            keyword = True
            continue
        fields = ARGUMENT.match(part)
        if fields is None:
            raise InputError("not the schema of an op")
        kind, called, default = fields.groups()
        written = "!" in kind
        parameters.append(Parameter(called, ALIAS.sub("", kind), keyword, default, written))
    given = returns.strip()
    inner = given[1:-1] if given.startswith("(") and given.endswith(")") else given
    kinds = tuple(ALIAS.sub("", part).split(" ")[0] for part in _split(inner))
    return Schema(name, overload or "default", tuple(parameters), kinds)


def _split(text: str) -> list[str]:
    """At the commas outside of brackets."""
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


def has_kernel(op: str, key: str) -> bool:
    """Whether an op (with its overload, if it has one) is registered under a dispatch key."""
    import torch

    if not op.isascii():  # C++ takes no other name
        return False
    try:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op, key))
    except RuntimeError:
        return False


def has_gpu() -> bool:
    """Whether PyTorch sees a GPU on this machine."""
    import torch

    return torch.cuda.is_available()
