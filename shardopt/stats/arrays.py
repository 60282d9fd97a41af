"""Ids in NumPy's files: ``[samples, features]`` (.npy), or an array a feature (.npz)."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from predictor.errors import InputError
from shardopt.files import read_problem
from shardopt.stats.counts import Bags
from shardopt.stats.source import Chunk, whole_numbers

_BROKEN = (ValueError, EOFError, zipfile.BadZipFile, zlib.error, KeyError)


class NpySource:
    """Integers ``[samples, features]``, as ``day_0_sparse.npy`` of the preprocessed Criteo 1TB
    data; features are called cat_0, cat_1, ..."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.array = np.load(path, mmap_mode="r", allow_pickle=False)
        except OSError as error:
            raise InputError(read_problem(path, "data file", error)) from None
        except _BROKEN as error:
            raise InputError(f"{path}: is no .npy file of numbers, or truncated: {error}") from None
        if self.array.ndim != 2:
            raise InputError(
                f"{path}: holds an array of shape {self.array.shape}; allowed: [samples, features]"
            )
        whole_numbers(self.array[:0], str(path))
        self.features: Sequence[str] = [f"cat_{i}" for i in range(self.array.shape[1])]

    def chunks(self, wanted: Sequence[str], rows: int, skip: int) -> Iterator[Chunk]:
        """As `Source.chunks`."""
        columns = {name: self.features.index(name) for name in wanted}
        for first in range(skip * rows, len(self.array), rows):
            part = self.array[first : first + rows]
            bags = {
                name: Bags(whole_numbers(part[:, column], f"{self.path}: {name}"))
                for name, column in columns.items()
            }
            yield Chunk(first, "row", bags)


class NpzSource:
    """An array ``[samples, ids]`` or ``[samples]`` of integers a feature.

    Source: ``day_0_sparse_multi_hot.npz`` of MLPerf's DLRM-DCNv2, whose arrays are called 0 to 25
    (mlcommons/training, materialize_synthetic_multihot_dataset.py); such are cat_0 to cat_25 here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with zipfile.ZipFile(path) as archive:
                members = [name for name in archive.namelist() if name.endswith(".npy")]
                self.heads = {_name(m): (m, *self._head(archive, m)) for m in members}
        except OSError as error:
            raise InputError(read_problem(path, "data file", error)) from None
        except _BROKEN as error:
            raise InputError(f"{path}: is no .npz file, or truncated: {error}") from None
        self.features: Sequence[str] = list(self.heads)

    def chunks(self, wanted: Sequence[str], rows: int, skip: int) -> Iterator[Chunk]:
        """As `Source.chunks`; arrays are read side by side, a chunk at a time."""
        if not wanted:
            return
        total = self._samples(wanted)
        try:
            with ExitStack() as stack:
                archive = stack.enter_context(zipfile.ZipFile(self.path))
                streams = {}
                for name in wanted:
                    member, shape, dtype = self.heads[name]
                    stream = stack.enter_context(archive.open(member))
                    _skip_head(stream)
                    stream.seek(stream.tell() + skip * rows * _ids(shape) * dtype.itemsize)
                    streams[name] = stream
                for first in range(skip * rows, total, rows):
                    count = min(rows, total - first)
                    bags = {name: self._bags(streams[name], name, count) for name in wanted}
                    yield Chunk(first, "row", bags)
        except OSError as error:
            raise InputError(read_problem(self.path, "data file", error)) from None
        except _BROKEN as error:
            raise InputError(f"{self.path}: is truncated or damaged: {error}") from None

    def _head(self, archive: zipfile.ZipFile, member: str) -> tuple[tuple[int, ...], np.dtype]:
        with archive.open(member) as stream:
            shape, fortran, dtype = _skip_head(stream)
        name = _name(member)
        if len(shape) not in (1, 2) or (fortran and len(shape) == 2 and min(shape) > 1):
            raise InputError(
                f"{self.path}: {name}: has the shape {shape}; allowed: [samples, ids] or [samples],"
                " in C order"
            )
        return shape, dtype

    def _samples(self, wanted: Sequence[str]) -> int:
        first = wanted[0]
        for name in wanted:
            whole_numbers(np.empty(0, self.heads[name][2]), f"{self.path}: {name}")
            if self.heads[name][1][0] != self.heads[first][1][0]:
                raise InputError(
                    f"{self.path}: '{name}' has {self.heads[name][1][0]} samples and '{first}' has "
                    f"{self.heads[first][1][0]}; all features must have as many"
                )
        return self.heads[first][1][0]

    def _bags(self, stream: IO[bytes], name: str, count: int) -> Bags:
        _, shape, dtype = self.heads[name]
        each = _ids(shape)
        raw = stream.read(count * each * dtype.itemsize)
        if len(raw) < count * each * dtype.itemsize:
            raise EOFError(f"{name} ends early")
        ids = whole_numbers(np.frombuffer(raw, dtype=dtype), f"{self.path}: {name}")
        return Bags(ids) if each == 1 else Bags(ids, np.full(count, each, dtype=np.int64))


def _name(member: str) -> str:
    stem = member.removesuffix(".npy")
    return f"cat_{stem}" if stem.isdigit() else stem


def _ids(shape: tuple[int, ...]) -> int:
    return shape[1] if len(shape) == 2 else 1


def _skip_head(stream: IO[bytes]) -> Any:
    """Shape, Fortran order and type of an array; the stream then stands at its data."""
    version = npy.read_magic(stream)
    if version == (1, 0):
        return npy.read_array_header_1_0(stream)
    return npy.read_array_header_2_0(stream)
