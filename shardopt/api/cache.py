"""Results of searches, kept under the user's cache directory for calls with the same input.

An entry is JSON behind its SHA-256, in a file that only its user may read; what is damaged, of
another user or of other code is not there, and a cache that cannot be placed, read or written is no
cache. Entries appear whole, so that several processes may write and read at once; the least
recently used ones go when there are too many.

Why: docs/decisions/0031-plan-in-use.md.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import Any

import numpy as np
from pydantic import BaseModel, TypeAdapter

from predictor.errors import InputError
from search.problem import Result
from shardopt.files import atomic_open, is_stream
from shardopt.version import __version__

MOST_BYTES = 2**28
ENDING = ".json"
FINAL = ("work", "gap")
"""Ends of a search whose answer is the same wherever and whenever it runs."""
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("predictor", "search", "shardopt")
SOURCES = (".py", ".yaml")
"""Files of the three packages on which an answer depends; profiles are YAML."""
SOLVERS = ("numpy", "ortools", "optuna")


@dataclass(frozen=True)
class ResultCache:
    """Results by the digest of what they were made from.

    Args:
        folder: made when the first result is kept.
        most_bytes: of all entries together, > 0.
    """

    folder: Path
    most_bytes: int = MOST_BYTES

    @classmethod
    def of_user(cls) -> ResultCache | None:
        """Return the cache of this process's user (XDG Base Directory Specification 0.8); None
        where there is neither a directory for caches nor a home."""
        configured = os.environ.get("XDG_CACHE_HOME", "")
        try:
            base = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
        except RuntimeError:
            return None
        return cls(base / "shardopt" / "answers")

    def recall(self, inputs: object, search: Callable[[], Result]) -> tuple[Result, bool]:
        """The result that is kept for the inputs, or that of ``search``, kept if neither the clock
        nor an interrupt cut it short; and whether it was kept.

        Args:
            inputs: all that decides the result, beside the code; see `digest`.
        """
        try:
            key = digest(inputs, code_digest(), versions(), solver_versions())
        except (TypeError, OSError):  # content is unknown, or the code cannot be read
            return search(), False
        cached = self._load(key)
        if cached is not None:
            return cached, True
        result = search()
        if result.stopped_by in FINAL:
            with suppress(OSError, InputError, ValueError):
                self._save(key, result)
        return result, False

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{ENDING}"

    def _load(self, key: str) -> Result | None:
        path = self._path(key)
        with suppress(OSError, ValueError, RecursionError):
            # anything may lie there: a FIFO would be waited for
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            with open(handle, "rb") as stream:
                there = os.fstat(handle)
                if not stat.S_ISREG(there.st_mode) or there.st_uid != os.getuid():
                    return None
                checksum, _, content = stream.read(self.most_bytes).partition(b"\n")
            if checksum.decode() == hashlib.sha256(content).hexdigest():
                os.utime(path)
                return TypeAdapter(Result).validate_json(content)
        return None

    def _save(self, key: str, result: Result) -> None:
        content, path = TypeAdapter(Result).dump_json(result), self._path(key)
        if len(content) > self.most_bytes or is_stream(path):
            return
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_open(path) as stream:
            stream.write(f"{hashlib.sha256(content).hexdigest()}\n".encode() + content)
        self._make_room()

    def _make_room(self) -> None:
        entries = []
        for path in self.folder.glob(f"*{ENDING}"):
            with suppress(OSError):  # another process may remove it
                status = path.stat()
                entries.append((status.st_mtime_ns, status.st_size, path))
        total = 0
        for _, size, path in sorted(entries, reverse=True):
            total += size
            if total > self.most_bytes:
                path.unlink(missing_ok=True)


def digest(*values: object) -> str:
    """SHA-256 of plain data: numbers, text, arrays, dataclasses, pydantic models, and containers of
    them. Fields that a dataclass does not compare do not count.

    Raises:
        TypeError: something is of another kind, whose content is not known.
    """
    hasher = hashlib.sha256()
    for part in _parts(values):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()


def _parts(value: Any) -> Iterator[bytes]:
    kind = type(value).__qualname__.encode()
    if isinstance(value, Enum):
        yield from (kind, repr(value.value).encode())
    elif value is None or isinstance(value, bool | int | float | str | bytes | np.generic):
        yield from (kind, repr(value).encode())
    elif isinstance(value, Path):
        yield from (b"path", str(value).encode())
    elif isinstance(value, np.ndarray):
        yield from (value.dtype.str.encode(), repr(value.shape).encode(), value.tobytes())
    elif isinstance(value, BaseModel):
        yield from (kind, value.model_dump_json().encode())
    elif isinstance(value, Set):
        yield from (b"set", *sorted(digest(item).encode() for item in value))
    elif is_dataclass(value):
        compared = [(f.name, getattr(value, f.name)) for f in fields(value) if f.compare]
        yield from (kind, *_parts(compared))
    elif isinstance(value, Mapping | Sequence):
        items = value.items() if isinstance(value, Mapping) else value
        yield b"%s %d" % (b"mapping" if isinstance(value, Mapping) else b"sequence", len(value))
        for item in items:
            yield from _parts(item)
    else:
        raise TypeError(f"the content of {type(value).__qualname__} is not known")


@cache
def code_digest() -> str:
    """SHA-256 of the three packages: a version alone does not tell two checkouts apart."""
    hasher = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*")):
            if path.suffix in SOURCES:
                hasher.update(path.relative_to(ROOT).as_posix().encode())
                hasher.update(hashlib.sha256(path.read_bytes()).digest())
    return hasher.hexdigest()


def versions() -> dict[str, str]:
    """Versions that a plan depends on; TorchRec's is read without importing it."""
    by_package = {"shardopt": __version__}
    with suppress(metadata.PackageNotFoundError):
        by_package["torchrec"] = metadata.version("torchrec")
    return by_package


@cache
def solver_versions() -> dict[str, str]:
    """Versions, beside those of shardopt and TorchRec, on which a plan depends."""
    return {"python": python_version(), **{name: metadata.version(name) for name in SOLVERS}}
