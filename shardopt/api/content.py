"""Digests of what a search is given: by content, whatever files it came from and where it runs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import Any

import numpy as np
from pydantic import BaseModel

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("predictor", "search", "shardopt")
SOURCES = (".py", ".yaml")
"""Files of the three packages on which an answer depends; profiles are YAML."""
SOLVERS = ("numpy", "ortools", "optuna")


def digest(*things: object) -> str:
    """SHA-256 of plain data: numbers, text, arrays, dataclasses, pydantic models, and containers of
    them. Fields that a dataclass does not compare do not count.

    Raises:
        TypeError: something is of another kind, whose content is not known.
    """
    found = hashlib.sha256()
    for part in _parts(things):
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()


def _parts(thing: Any) -> Iterator[bytes]:
    kind = type(thing).__qualname__.encode()
    if isinstance(thing, Enum):
        yield from (kind, repr(thing.value).encode())
    elif thing is None or isinstance(thing, bool | int | float | str | bytes | np.generic):
        yield from (kind, repr(thing).encode())
    elif isinstance(thing, Path):
        yield from (b"path", str(thing).encode())
    elif isinstance(thing, np.ndarray):
        yield from (thing.dtype.str.encode(), repr(thing.shape).encode(), thing.tobytes())
    elif isinstance(thing, BaseModel):
        yield from (kind, thing.model_dump_json().encode())
    elif is_dataclass(thing):
        yield kind
        for field in fields(thing):
            if field.compare:
                yield field.name.encode()
                yield from _parts(getattr(thing, field.name))
    else:
        yield from _parts_of_many(thing)


def _parts_of_many(thing: Any) -> Iterator[bytes]:
    if isinstance(thing, Mapping):
        yield b"mapping %d" % len(thing)
        for pair in thing.items():
            yield from _parts(pair)
    elif isinstance(thing, Set):
        yield from (b"set", *sorted(digest(item).encode() for item in thing))
    elif isinstance(thing, Sequence):
        yield b"sequence %d" % len(thing)
        for item in thing:
            yield from _parts(item)
    else:
        raise TypeError(f"the content of {type(thing).__qualname__} is not known")


@cache
def code_digest() -> str:
    """SHA-256 of the three packages: a version alone does not tell two checkouts apart."""
    found = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*")):
            if path.suffix in SOURCES:
                found.update(path.relative_to(ROOT).as_posix().encode())
                found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


@cache
def solver_versions() -> dict[str, str]:
    """Versions, beside those of shardopt and TorchRec, on which a plan depends."""
    return {"python": python_version(), **{name: metadata.version(name) for name in SOLVERS}}
