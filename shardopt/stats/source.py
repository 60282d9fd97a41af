"""What every reader of data files shares: chunks of samples, names of features, formats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from predictor.errors import InputError, did_you_mean
from shardopt.stats.counts import Bags

Times = NDArray[np.float64]
"""Unix seconds of some samples, ``[samples]``."""

CHUNK_ROWS = 65536
"""Samples that are read at once."""


class DataFormat(StrEnum):
    """File formats of data."""

    TSV = "tsv"
    NPY = "npy"
    NPZ = "npz"
    PARQUET = "parquet"
    TORCH = "torch"
    INTER = "inter"


ENDINGS = {
    ".tsv": DataFormat.TSV,
    ".txt": DataFormat.TSV,
    "": DataFormat.TSV,  # as Criteo names its days
    ".npy": DataFormat.NPY,
    ".npz": DataFormat.NPZ,
    ".parquet": DataFormat.PARQUET,
    ".pq": DataFormat.PARQUET,
    ".pt": DataFormat.TORCH,
    ".pth": DataFormat.TORCH,
    ".inter": DataFormat.INTER,
}
"""Formats by the last part of a file name, without ``.gz``."""
GZIPPED = (DataFormat.TSV, DataFormat.TORCH)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some consecutive samples of a file.

    Args:
        first: where the first of them stands, in ``unit``.
        unit: ``line`` (counted from 1) or ``row`` (from 0).
        bags: by feature; all have as many samples.
        times: when the samples were, where that was asked for.
    """

    first: int
    unit: str
    bags: Mapping[str, Bags]
    times: Times | None = None


class Source(Protocol):
    """A data file that is open for reading."""

    @property
    def features(self) -> Sequence[str]:
        """Names of the sparse features, in the file's order."""
        ...

    @property
    def times(self) -> Sequence[str]:
        """Names of the columns that can say when a sample was."""
        ...

    def chunks(
        self, wanted: Sequence[str], rows: int, skip: int, time: str | None = None
    ) -> Iterator[Chunk]:
        """The samples in order.

        Args:
            wanted: some of ``features``.
            rows: samples of a chunk.
            skip: chunks to leave out at the start.
            time: which of ``times`` says when the samples were; None where nobody asks.
        """
        ...


def format_of(path: Path) -> DataFormat:
    """The format of a file by its name.

    Raises:
        InputError: the name does not tell it.
    """
    name = Path(path.stem) if path.suffix == ".gz" else path
    found = ENDINGS.get(name.suffix.lower())
    if found is None and name.suffix[1:].isdigit():
        found = DataFormat.TSV
    if found is None or (path.suffix == ".gz" and found not in GZIPPED):
        known = ", ".join(ending for ending in ENDINGS if ending)
        raise InputError(
            f"{path}: the file name does not tell the format; known endings are {known}, and .gz "
            f"after tsv, txt and pt; give one of the formats {', '.join(DataFormat)}",
            inputs=("format",),
        )
    return found


def pick(path: Path, there: Sequence[str], wanted: Sequence[str]) -> None:
    """Refuse features that a file does not have.

    Raises:
        InputError: names the first one that is missing.
    """
    for name in wanted:
        if name not in there:
            shown = ", ".join(there[:30]) + (", ..." if len(there) > 30 else "")
            raise InputError(
                f"{path}: has no feature '{name}'{did_you_mean(name, there)}; it has: "
                f"{shown or 'none'}",
                inputs=("features",),
            )


def whole_numbers(values: NDArray, where: str) -> NDArray[np.int64]:
    """An array of ids as int64.

    Args:
        where: file and feature, for the message.

    Raises:
        InputError: it holds other things than integers, or some too large for int64.
    """
    if values.dtype.kind not in "iu":
        raise InputError(f"{where}: holds {values.dtype} values; ids must be integers")
    if values.dtype == np.uint64 and values.size and int(values.max()) >= 2**63:
        raise InputError(
            f"{where}: got the id {int(values.max())}; the largest allowed is 2^63 - 1"
        )
    return values.astype(np.int64)


def seconds(values: NDArray) -> Times:
    """Unix times as seconds: larger numbers are milli-, micro- or nanoseconds.

    Seconds of the next thousand years have at most eleven digits.
    """
    largest = float(np.abs(values).max()) if len(values) else 0.0
    unit = next((unit for unit in (1, 1e3, 1e6) if largest < 1e11 * unit), 1e9)
    return np.asarray(values, dtype=np.float64) / unit
