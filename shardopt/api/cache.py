"""Answers of searches, kept under the user's cache directory for the next call with the same input.

An entry is a pickle behind its own SHA-256, in a file that only its user may read; what is damaged,
of another user or of other code is not there. Entries appear whole, so that several processes may
write and read at once; the least recently used ones go when there are too many.

Why: docs/decisions/0066.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

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
        folder: made when the first answer is kept.
        most_bytes: of all entries together, > 0.
    """

    folder: Path
    most_bytes: int = MOST_BYTES

    @classmethod
    def of_user(cls) -> ResultCache:
        """That of the user who runs this process (XDG Base Directory Specification 0.8)."""
        given = os.environ.get("XDG_CACHE_HOME", "")
        base = Path(given) if os.path.isabs(given) else Path("~/.cache").expanduser()
        return cls(base / "shardopt" / "answers")

    def recall(self, inputs: object, compute: Callable[[], T], keep: Callable[[T], bool]) -> T:
        """The answer that is kept for the inputs, or that of ``compute``, kept if ``keep`` says so.

        Args:
            inputs: all that decides the answer, beside the code; see `digest`.
        """
        try:
            key = digest(inputs, code_digest(), versions(), solver_versions())
        except (TypeError, OSError):  # of unknown content, or the code cannot be read
            return compute()
        known = self._load(key)
        if known is not None:
            answer: T = known[0]
            return answer
        answer = compute()
        if keep(answer):
            # a cache that cannot be written is none: what was asked for is there
            with suppress(OSError, InputError, pickle.PicklingError, TypeError, AttributeError):
                self._save(key, answer)
        return answer

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{ENDING}"

    def _load(self, key: str) -> tuple[Any] | None:
        """The answer, in a tuple; None if there is none that can be used."""
        path = self._path(key)
        try:
            with path.open("rb") as stream:
                if os.fstat(stream.fileno()).st_uid != os.getuid():
                    return None
                checksum, payload = stream.read(32), stream.read()
            if hashlib.sha256(payload).digest() != checksum:
                return None
            os.utime(path)
            return (pickle.loads(payload),)
        except Exception:  # damaged entries can raise anything
            return None

    def _save(self, key: str, answer: object) -> None:
        payload = pickle.dumps(answer, pickle.HIGHEST_PROTOCOL)
        if len(payload) > self.most_bytes:
            return
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with atomic_open(self._path(key)) as stream:
            stream.write(hashlib.sha256(payload).digest() + payload)
        self._make_room()

    def _make_room(self) -> None:
        """Remove the least recently used entries beyond the limit."""
        entries = []
        for path in self.folder.glob(f"*{ENDING}"):
            with suppress(OSError):  # another process may remove it
                found = path.stat()
                entries.append((found.st_mtime_ns, found.st_size, path))
        entries.sort(reverse=True)
        total = 0
        for _, size, path in entries:
            total += size
            if total > self.most_bytes:
                path.unlink(missing_ok=True)
