"""What code a row of the search benchmark comes from: a digest of the sources behind it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

import predictor
import search
from lab.planners.rows import TORCHREC
from shardopt.extras import needs_torchrec

DIGITS = 12
"""Of a digest, in hexadecimal."""
SUFFIXES = (".py", ".yaml", ".csv")
RATING = "baselines"
"""Room of `search` with TorchRec's rating, which is all that TorchRec's own rows take from it."""


@cache
def sources_of(planner: str) -> str:
    """Digest of the code that a planner's rows come from; rows of another are run again.

    That is all of `predictor` with its profiles, which scores every plan, all of `search`, this
    package with its instances. TorchRec's planners do not ask our search, but are of a version of
    torchrec.

    Raises:
        MissingPackageError: there is no torchrec, and it is asked for.
    """
    theirs = planner.startswith(TORCHREC)
    found = Path(search.__file__).parent
    folders = [Path(predictor.__file__).parent, found / RATING if theirs else found]
    with needs_torchrec():
        digest = hashlib.sha256(metadata.version("torchrec").encode() if theirs else b"")
    for folder in [*folders, Path(__file__).parent]:
        for path in _files(folder):
            digest.update(f"\0{folder.name}/{path.relative_to(folder)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:DIGITS]


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.suffix in SUFFIXES)
