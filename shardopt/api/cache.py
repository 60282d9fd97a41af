"""Answers of searches, kept under the user's cache directory for the next call with the same input.

An entry is JSON behind its own SHA-256, read as the type that is asked for: nothing in it can run.
What is damaged, no regular file, of another user or of other code is not there, and neither is a
cache that cannot be placed, read or written. Entries appear whole, so that several processes may
write and read at once; the least recently used ones go when there are too many.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter

from predictor.errors import InputError
from search.problem import Result
from shardopt.api.content import code_digest, digest, solver_versions
from shardopt.api.plan_file import versions
from shardopt.files import atomic_open

MOST_BYTES = 2**28
ENDING = ".answer"
FINAL = ("work", "gap")
"""How a search ends whose answer is the same wherever and whenever it runs."""

T = TypeVar("T")


def is_final(result: Result) -> bool:
    """Whether the next call would find the same: neither the clock nor Ctrl-C cut the search."""
    return result.stopped_by in FINAL


@dataclass(frozen=True)
class ResultCache:
    """Answers by the digest of what they were made from.

    Args:
        folder: made when the first answer is kept; None keeps nothing.
        most_bytes: of all entries together, > 0.
    """

    folder: Path | None
    most_bytes: int = MOST_BYTES

    @classmethod
    def of_user(cls) -> ResultCache:
        """That of the user who runs this process (XDG Base Directory Specification 0.8); a user
        without a home directory has none."""
        given = os.environ.get("XDG_CACHE_HOME", "")
        try:
            base = Path(given) if os.path.isabs(given) else Path("~/.cache").expanduser()
        except RuntimeError:
            return cls(None)
        return cls(base / "shardopt" / "answers")

    def recall(
        self, inputs: object, kind: type[T], compute: Callable[[], T], keep: Callable[[T], bool]
    ) -> T:
        """The answer that is kept for the inputs, or that of ``compute``, kept if ``keep`` says so.

        Args:
            inputs: all that decides the answer, beside the code; see `digest`.
            kind: of the answer: plain data, or dataclasses of it with their annotations. Of an
                answer of a subclass only the fields of ``kind`` are kept.
        """
        try:
            key = digest(inputs, code_digest(), versions(), solver_versions())
        except (TypeError, OSError):  # of unknown content, or the code cannot be read
            return compute()
        if self.folder is None:
            return compute()
        path, adapter = self.folder / f"{key}{ENDING}", TypeAdapter(kind)
        known = self._read(path)
        with suppress(ValueError):  # of another type
            if known is not None:
                return adapter.validate_json(known)
        answer = compute()
        if keep(answer):
            # a cache that cannot be written is none: what was asked for is there
            with suppress(OSError, InputError, ValueError):
                self._write(path, adapter.dump_json(answer, warnings="error"))
        return answer

    def _read(self, path: Path) -> bytes | None:
        """The content of an entry; None if there is none that can be used."""
        try:
            there = os.stat(path)
            if not stat.S_ISREG(there.st_mode) or there.st_uid != os.getuid():
                return None
            entry = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        checksum, content = entry[:32], entry[32:]
        return content if hashlib.sha256(content).digest() == checksum else None

    def _write(self, path: Path, content: bytes) -> None:
        if len(content) > self.most_bytes:
            return
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_open(path) as stream:
            stream.write(hashlib.sha256(content).digest() + content)
        # the least recently used entries beyond the limit go
        entries = []
        for entry in path.parent.glob(f"*{ENDING}"):
            with suppress(OSError):  # another process may remove it
                found = entry.stat()
                entries.append((found.st_mtime_ns, found.st_size, entry))
        total = 0
        for _, size, entry in sorted(entries, reverse=True):
            total += size
            if total > self.most_bytes:
                entry.unlink(missing_ok=True)
