"""Ids in NumPy's files: ``[samples, features]`` (.npy), or an array a feature (.npz)."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import numpy as np

from predictor.errors import InputError
from shardopt.files import read_problem
from shardopt.npz import BROKEN, Head, read_head
from shardopt.stats.counts import Bags
from shardopt.stats.source import CHUNK_ROWS, Chunk, seconds, whole_numbers

MOST_FEATURES = 2**16
MOST_BYTES = 2**30
"""Of a chunk of samples of one feature."""


class NpySource:
    """Integers ``[samples, features]``, as ``day_0_sparse.npy`` of the preprocessed Criteo 1TB
    data; features are called cat_0, cat_1, ..."""

    times: Sequence[str] = ()

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.array = _map(path)
        except OSError as error:
            raise InputError(read_problem(path, "data file", error)) from None
        except BROKEN as error:
            raise InputError(f"{path}: is no .npy file of numbers, or truncated: {error}") from None
        if self.array.ndim != 2:
            raise InputError(
                f"{path}: holds an array of shape {self.array.shape}; allowed: [samples, features]"
            )
        if self.array.shape[1] > MOST_FEATURES:
            raise InputError(
                f"{path}: has {self.array.shape[1]} columns; one a feature, at most {MOST_FEATURES}"
            )
        whole_numbers(self.array[:0], str(path))
        self.features: Sequence[str] = [f"cat_{i}" for i in range(self.array.shape[1])]

    def chunks(
        self, wanted: Sequence[str], rows: int, skip: int, time: str | None = None
    ) -> Iterator[Chunk]:
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
                self.heads = {_name(m): (m, self._head(archive, m)) for m in members}
        except OSError as error:
            raise InputError(read_problem(path, "data file", error)) from None
        except BROKEN as error:
            raise InputError(f"{path}: is no .npz file, or truncated: {error}") from None
        self.features: Sequence[str] = list(self.heads)
        self.times: Sequence[str] = [
            name for name, (_, head) in self.heads.items() if _ids(head.shape) == 1
        ]

    def chunks(
        self, wanted: Sequence[str], rows: int, skip: int, time: str | None = None
    ) -> Iterator[Chunk]:
        """As `Source.chunks`; arrays are read side by side, a chunk at a time."""
        if not wanted:
            return
        read = list(dict.fromkeys([*wanted, *filter(None, [time])]))
        total = self._samples(read)
        try:
            with ExitStack() as stack:
                archive = stack.enter_context(zipfile.ZipFile(self.path))
                streams = {}
                for name in read:
                    member, head = self.heads[name]
                    stream = stack.enter_context(archive.open(member))
                    read_head(stream)
                    size = _ids(head.shape) * head.dtype.itemsize
                    stream.seek(stream.tell() + skip * rows * size)
                    streams[name] = stream
                for first in range(skip * rows, total, rows):
                    count = min(rows, total - first)
                    bags = {name: self._bags(streams[name], name, count) for name in read}
                    when = None if time is None else seconds(bags[time].ids)
                    yield Chunk(first, "row", {name: bags[name] for name in wanted}, when)
        except OSError as error:
            raise InputError(read_problem(self.path, "data file", error)) from None
        except BROKEN as error:
            raise InputError(f"{self.path}: is truncated or damaged: {error}") from None

    def _head(self, archive: zipfile.ZipFile, member: str) -> Head:
        with archive.open(member) as stream:
            head = read_head(stream)
        name, shape = _name(member), head.shape
        if len(shape) not in (1, 2) or (head.fortran and len(shape) == 2 and min(shape) > 1):
            raise InputError(
                f"{self.path}: {name}: has the shape {shape}; allowed: [samples, ids] or [samples],"
                " in C order"
            )
        if _ids(shape) * head.dtype.itemsize * CHUNK_ROWS > MOST_BYTES:
            raise InputError(f"{self.path}: {name}: has {_ids(shape)} ids a sample, too many")
        return head

    def _samples(self, wanted: Sequence[str]) -> int:
        first = wanted[0]
        samples = {name: self.heads[name][1].shape[0] for name in wanted}
        for name in wanted:
            whole_numbers(np.empty(0, self.heads[name][1].dtype), f"{self.path}: {name}")
            if samples[name] != samples[first]:
                raise InputError(
                    f"{self.path}: '{name}' has {samples[name]} samples and '{first}' has "
                    f"{samples[first]}; all features must have as many"
                )
        return samples[first]

    def _bags(self, stream: IO[bytes], name: str, count: int) -> Bags:
        _, head = self.heads[name]
        each = _ids(head.shape)
        size = count * each * head.dtype.itemsize
        raw = stream.read(size)
        if len(raw) < size:
            raise EOFError(f"{name} ends early")
        ids = whole_numbers(np.frombuffer(raw, dtype=head.dtype), f"{self.path}: {name}")
        return Bags(ids) if each == 1 else Bags(ids, np.full(count, each, dtype=np.int64))


def _name(member: str) -> str:
    stem = member.removesuffix(".npy")
    return f"cat_{stem}" if stem.isdigit() else stem


def _ids(shape: tuple[int, ...]) -> int:
    return shape[1] if len(shape) == 2 else 1


def _map(path: Path) -> np.ndarray:
    """The array of a file, without reading it.

    Raises:
        OSError, or one of `BROKEN`: it cannot be read, is damaged or shorter than its head says.
    """
    with path.open("rb") as stream:
        head = read_head(stream)
        at, there = stream.tell(), path.stat().st_size
    if at + head.size * head.dtype.itemsize > there:
        raise EOFError("it ends early")
    if not head.size:
        return np.empty(head.shape, head.dtype)
    return np.memmap(path, head.dtype, "r", at, head.shape, head.order)
