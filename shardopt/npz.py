"""NumPy's files: heads that may be damaged, and arrays no larger than is asked for."""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from predictor.files import remember_input

BROKEN = (ValueError, EOFError, zipfile.BadZipFile, zlib.error, KeyError, NotImplementedError)
"""Errors of reading a damaged file, beside OSError."""
# NumPy evaluates the head as a Python literal and looks its parts up unchecked
_BAD_HEAD = (
    SyntaxError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    tokenize.TokenError,
)


@dataclass(frozen=True)
class Head:
    """Header of an array in its file."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def order(self) -> Literal["C", "F"]:
        """Order of the axes as NumPy names it."""
        return "F" if self.fortran else "C"


def read_head(stream: IO[bytes]) -> Head:
    """The head of an array; the stream then stands at its data.

    Raises:
        ValueError: it is damaged, or the array holds Python objects.
    """
    try:
        version = npy.read_magic(stream)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(stream)
    except _BAD_HEAD as error:
        raise ValueError(f"its head is damaged: {error}") from None
    if min(shape, default=0) < 0 or dtype.hasobject or not dtype.itemsize:
        raise ValueError(f"its head is damaged: shape {shape}, type {dtype}")
    return Head(shape, fortran, dtype)


def load_arrays(path: Path, most_bytes: int) -> dict[str, NDArray]:
    """Load all arrays of an .npz file.

    Raises:
        OSError: it cannot be read.
        ValueError, or another of `BROKEN`: it is damaged, or its arrays are larger than
            ``most_bytes`` in all.
    """
    arrays = {}
    remember_input(path)
    with zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            with archive.open(member) as stream:
                head = read_head(stream)
                size = head.size * head.dtype.itemsize
                most_bytes -= size
                if most_bytes < 0:
                    raise ValueError("its arrays are larger than any that belong here")
                raw = stream.read(size)
            if len(raw) < size:
                raise EOFError(f"{member} ends early")
            array = np.frombuffer(raw, dtype=head.dtype).reshape(head.shape, order=head.order)
            arrays[member.removesuffix(".npy")] = array
    return arrays
