"""Data files of all formats, read in chunks of samples.

A reader has the names of its sparse features and of the columns that may hold the time of a sample,
and yields chunks of consecutive samples.
"""

from __future__ import annotations

import csv
import gzip
import math
import re
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, BinaryIO, TextIO, cast

import numpy as np
from numpy.typing import NDArray

from predictor.errors import InputError, did_you_mean
from predictor.files import open_input
from shardopt.files import read_problem
from shardopt.npz import BROKEN, Head, read_head
from shardopt.stats.counts import Bags, sample_of

Times = NDArray[np.float64]
"""Unix seconds of some samples, ``[samples]``."""

CHUNK_ROWS = 65536
"""Samples that are read at once."""
MOST_FEATURES = 2**16
MOST_BYTES = 2**30
"""Most bytes of one feature in a chunk of samples."""
MAX_ID = 2**63 - 1


class DataFormat(StrEnum):
    """File formats of data."""

    TSV = "tsv"
    NPY = "npy"
    NPZ = "npz"
    PARQUET = "parquet"
    TORCH = "torch"
    INTER = "inter"
    CSV = "csv"


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
    ".csv": DataFormat.CSV,
}
"""Formats by the last part of a file name, without ``.gz``."""
GZIPPED = (DataFormat.TSV, DataFormat.TORCH)


@dataclass(frozen=True, eq=False)
class Chunk:
    """Some consecutive samples of a file.

    Args:
        first: position of the first sample, in ``unit``.
        unit: ``line`` (counted from 1) or ``row`` (from 0).
        bags: by feature; all have as many samples.
        times: times of the samples, if requested.
    """

    first: int
    unit: str
    bags: Mapping[str, Bags]
    times: Times | None = None


class Source(ABC):
    """A data file that is open for reading.

    Attributes:
        features: names of the sparse features, in the file's order.
        times: names of the columns that may hold the time of a sample.
        unit, first: unit in which samples are counted, and the number of the first.
        damaged: exceptions that its library raises for wrong content.
    """

    path: Path
    features: Sequence[str]
    times: Sequence[str] = ()
    unit, first = "row", 0
    damaged: tuple[type[Exception], ...] = ()

    def chunks(
        self, features: Sequence[str], rows: int, skip: int, time: str | None = None
    ) -> Iterator[Chunk]:
        """Yield the samples in order.

        Args:
            features: some of ``features``.
            rows: samples of a chunk.
            skip: chunks to leave out at the start.
            time: the column of ``times`` to read; None: no times.

        Raises:
            InputError: names file, line or row, and feature.
        """
        read = list(dict.fromkeys([*features, *filter(None, [time])]))
        first = self.first
        with _errors(self.path, self.damaged):
            for number, (count, part) in enumerate(self._parts(read, rows)):
                if number >= skip:
                    bags = {name: self._bags(part, name, first) for name in features}
                    when = None if time is None else self._when(part, time, first)
                    yield Chunk(first, self.unit, bags, when)
                first += count

    @abstractmethod
    def _parts(self, read: Sequence[str], rows: int) -> Iterator[tuple[int, Any]]:
        """Yield the samples of each chunk, and the part of it that `_bags` and `_when` read.

        A skipped chunk costs little.
        """

    @abstractmethod
    def _bags(self, part: Any, name: str, first: int) -> Bags:
        """Return the ids of a feature; ``first`` is the number of the first sample."""

    def _when(self, part: Any, name: str, first: int) -> Times:
        raise NotImplementedError


def open_source(path: Path, data_format: DataFormat | None) -> Source:
    """Open the reader of a file.

    Args:
        data_format: None: by the file's name.

    Raises:
        InputError: the file is missing, or not of its format.
    """
    try:
        open_input(path).close()
    except (OSError, ValueError) as error:
        raise InputError(read_problem(path, "data file", error)) from None
    readers: dict[DataFormat, Callable[[Path], Source]] = {
        DataFormat.TSV: TsvSource,
        DataFormat.NPY: NpySource,
        DataFormat.NPZ: NpzSource,
        DataFormat.PARQUET: ParquetSource,
        DataFormat.TORCH: TensorSource,
        DataFormat.INTER: InterSource,
        DataFormat.CSV: CsvSource,
    }
    return readers[data_format or format_of(path)](path)


def format_of(path: Path) -> DataFormat:
    """Return the format of a file by its name.

    Raises:
        InputError: the name does not tell it.
    """
    name = Path(path.stem) if path.suffix == ".gz" else path
    data_format = ENDINGS.get(name.suffix.lower())
    if data_format is None and name.suffix[1:].isdigit():
        data_format = DataFormat.TSV
    if data_format is None or (path.suffix == ".gz" and data_format not in GZIPPED):
        endings = ", ".join(ending for ending in ENDINGS if ending)
        raise InputError(
            f"{path}: the file name does not tell the format; known endings are {endings}, and .gz "
            f"after tsv, txt and pt; give one of the formats {', '.join(DataFormat)}",
            inputs=("format",),
        )
    return data_format


def pick(path: Path, there: Sequence[str], features: Sequence[str]) -> None:
    """Refuse features that a file does not have.

    Raises:
        InputError: names the first one that is missing.
    """
    for name in features:
        if name not in there:
            shown = ", ".join(there[:30]) + (", ..." if len(there) > 30 else "")
            raise InputError(
                f"{path}: has no feature '{name}'{did_you_mean(name, there)}; it has: "
                f"{shown or 'none'}",
                inputs=("features",),
            )


def whole_numbers(values: NDArray, where: str) -> NDArray[np.int64]:
    """Return an array of ids as int64.

    Args:
        where: file and feature, for the message.

    Raises:
        InputError: it holds values that are no integers, or too large for int64.
    """
    if values.dtype.kind not in "iu":
        raise InputError(f"{where}: holds {values.dtype} values; ids must be integers")
    if values.dtype == np.uint64 and values.size and int(values.max()) > MAX_ID:
        raise InputError(
            f"{where}: got the id {int(values.max())}; the largest allowed is 2^63 - 1"
        )
    return values.astype(np.int64)


def seconds(values: NDArray) -> Times:
    """Convert Unix times to seconds: larger numbers are milli-, micro- or nanoseconds.

    Seconds of the next thousand years have at most eleven digits.
    """
    largest = float(np.abs(values).max()) if len(values) else 0.0
    unit = next((unit for unit in (1, 1e3, 1e6) if largest < 1e11 * unit), 1e9)
    return np.asarray(values, dtype=np.float64) / unit


@contextmanager
def _errors(
    path: Path, damaged: tuple[type[Exception], ...] = (), problem: str = "is damaged or truncated"
) -> Iterator[None]:
    """Turn failures to read a file into errors that name it.

    Args:
        damaged: exceptions that its library raises for wrong content.
        problem: the message for these.
    """
    try:
        yield
    except damaged as error:
        raise InputError(f"{path}: {problem}: {error}") from None
    except OSError as error:
        raise InputError(read_problem(path, "data file", error)) from None


class TsvSource(Source):
    """Criteo's click logs, gzipped or not: lines of a label, 13 integers and 26 hexadecimal
    categories, with tabs.

    An empty category is id 0, as TorchRec's preprocessing takes it, which also names the categories
    (torchrec/datasets/criteo.py, `tsv_to_npys`, DEFAULT_CAT_NAMES).
    """

    features = tuple(f"cat_{i}" for i in range(26))
    widths = (40, 39)
    """Columns of a line: with the label, or without it as in Criteo's test files."""
    max_digits = 15

    unit, first = "line", 1
    damaged = (EOFError, gzip.BadGzipFile, zlib.error)

    def __init__(self, path: Path) -> None:
        self.path = path

    def _parts(self, read: Sequence[str], rows: int) -> Iterator[tuple[int, Any]]:
        width = 0
        with (gzip.open if self.path.suffix == ".gz" else open)(self.path, "rb") as stream:
            while lines := list(islice(cast(BinaryIO, stream), rows)):
                width = width or lines[0].count(b"\t") + 1
                if width not in self.widths:
                    raise InputError(
                        f"{self.path}:1: has {width} columns; allowed: 40 (label, 13 integers, 26 "
                        "hexadecimal categories), or 39 without the label, separated by tabs"
                    )
                yield len(lines), cache(partial(self._cells, lines, width))

    def _cells(
        self, lines: list[bytes], width: int, first: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.intp]]:
        """Return all text, and the ends of its cells, ``[lines, width]``."""
        end = b"" if lines[-1].endswith(b"\n") else b"\n"
        text = np.frombuffer((b"".join(lines) + end).replace(b"\r\n", b"\n"), dtype=np.uint8)
        breaks = np.flatnonzero((text == 9) | (text == 10))
        if len(breaks) != len(lines) * width or (text[breaks[width - 1 :: width]] != 10).any():
            for number, line in enumerate(lines, start=first):
                columns = line.count(b"\t") + 1
                if columns != width:
                    raise InputError(
                        f"{self.path}:{number}: has {columns} columns; line 1 has {width}, and all "
                        "lines must have as many"
                    )
        return text, breaks.reshape(len(lines), width)

    def _bags(self, part: Any, name: str, first: int) -> Bags:
        text, ends = part(first)
        at = ends.shape[1] - 26 + self.features.index(name)
        start, length = ends[:, at - 1] + 1, ends[:, at] - ends[:, at - 1] - 1
        ids = np.zeros(len(start), dtype=np.int64)
        wrong = length > self.max_digits
        for place in range(min(int(length.max()), self.max_digits)):
            there = np.flatnonzero(length > place)
            digit = _DIGITS[text[start[there] + place]]
            wrong[there[digit == 255]] = True
            ids[there] = ids[there] * 16 + digit
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            cell = bytes(text[start[row] : start[row] + length[row]])
            raise InputError(
                f"{self.path}:{first + row}: {name}: got "
                f"{cell.decode('utf-8', errors='replace')!r}; allowed: a hexadecimal number of at "
                f"most {self.max_digits} digits, or nothing, which counts as id 0"
            )
        return Bags(ids)


_DIGITS = np.full(256, 255, dtype=np.uint8)
for _character in b"0123456789abcdefABCDEF":
    _DIGITS[_character] = int(chr(_character), 16)


class NpySource(Source):
    """Integers ``[samples, features]``, as ``day_0_sparse.npy`` of the preprocessed Criteo 1TB
    data; features are called cat_0, cat_1, ..."""

    def __init__(self, path: Path) -> None:
        self.path = path
        problem = "is no .npy file of numbers, or truncated"
        with _errors(path, BROKEN, problem), path.open("rb") as stream:
            head, at = read_head(stream), stream.tell()
            if at + head.size * head.dtype.itemsize > path.stat().st_size:
                raise EOFError("it ends early")
            self.array = np.empty(head.shape, head.dtype)
            if head.size:
                self.array = np.memmap(path, head.dtype, "r", at, head.shape, head.order)
        if self.array.ndim != 2:
            raise InputError(
                f"{path}: holds an array of shape {self.array.shape}; allowed: [samples, features]"
            )
        if self.array.shape[1] > MOST_FEATURES:
            raise InputError(
                f"{path}: has {self.array.shape[1]} columns; one a feature, at most {MOST_FEATURES}"
            )
        whole_numbers(self.array[:0], str(path))
        self.features = [f"cat_{i}" for i in range(self.array.shape[1])]

    def _parts(self, read: Sequence[str], rows: int) -> Iterator[tuple[int, Any]]:
        for first in range(0, len(self.array), rows):
            part = self.array[first : first + rows]
            yield len(part), part

    def _bags(self, part: Any, name: str, first: int) -> Bags:
        return Bags(whole_numbers(part[:, self.features.index(name)], f"{self.path}: {name}"))


class NpzSource(Source):
    """An array ``[samples, ids]`` or ``[samples]`` of integers a feature.

    Source: ``day_0_sparse_multi_hot.npz`` of MLPerf's DLRM-DCNv2, whose arrays are called 0 to 25
    (mlcommons/training, materialize_synthetic_multihot_dataset.py); such are cat_0 to cat_25 here.
    """

    damaged = BROKEN

    def __init__(self, path: Path) -> None:
        self.path = path
        self.heads: dict[str, tuple[str, Head]] = {}
        problem = "is no .npz file, or truncated"
        with _errors(path, BROKEN, problem), zipfile.ZipFile(path) as archive:
            for member in archive.namelist():
                stem = member.removesuffix(".npy")
                if stem != member:
                    name = f"cat_{stem}" if stem.isdigit() else stem
                    with archive.open(member) as stream:
                        self.heads[name] = member, self._checked(read_head(stream), name)
        self.features = list(self.heads)
        self.times = [name for name, (_, head) in self.heads.items() if _width(head) == 1]

    def _checked(self, head: Head, name: str) -> Head:
        shape = head.shape
        if len(shape) not in (1, 2) or (head.fortran and len(shape) == 2 and min(shape) > 1):
            raise InputError(
                f"{self.path}: {name}: has the shape {shape}; allowed: [samples, ids] or [samples],"
                " in C order"
            )
        if _width(head) * head.dtype.itemsize * CHUNK_ROWS > MOST_BYTES:
            raise InputError(f"{self.path}: {name}: has {_width(head)} ids a sample, too many")
        return head

    def _parts(self, read: Sequence[str], rows: int) -> Iterator[tuple[int, Any]]:
        """Read the arrays side by side, a chunk at a time."""
        total = self.heads[read[0]][1].shape[0] if read else 0
        with ExitStack() as stack:
            archive = stack.enter_context(zipfile.ZipFile(self.path))
            streams = {}
            for name in read:
                member, head = self.heads[name]
                whole_numbers(np.empty(0, head.dtype), f"{self.path}: {name}")
                if head.shape[0] != total:
                    raise InputError(
                        f"{self.path}: '{name}' has {head.shape[0]} samples and '{read[0]}' has "
                        f"{total}; all features must have as many"
                    )
                stream = stack.enter_context(archive.open(member))
                read_head(stream)
                streams[name] = stream, stream.tell()
            for first in range(0, total, rows):
                count = min(rows, total - first)
                yield count, cache(partial(self._ids, streams, count))

    def _ids(
        self, streams: Mapping[str, tuple[IO[bytes], int]], count: int, name: str, first: int
    ) -> NDArray[np.int64]:
        _, head = self.heads[name]
        stream, start = streams[name]
        each = _width(head) * head.dtype.itemsize
        stream.seek(start + first * each)
        raw = stream.read(count * each)
        if len(raw) < count * each:
            raise EOFError(f"{name} ends early")
        return whole_numbers(np.frombuffer(raw, dtype=head.dtype), f"{self.path}: {name}")

    def _bags(self, part: Any, name: str, first: int) -> Bags:
        ids, each = part(name, first), _width(self.heads[name][1])
        return Bags(ids) if each == 1 else Bags(ids, np.full(len(ids) // each, each))

    def _when(self, part: Any, name: str, first: int) -> Times:
        return seconds(part(name, first))


def _width(head: Head) -> int:
    """Return the ids of a sample."""
    return head.shape[1] if len(head.shape) == 2 else 1


class ParquetSource(Source):
    """Parquet columns: integers, or lists of integers for features with several ids. A null is a
    sample without an id; columns of other types are no features."""

    def __init__(self, path: Path) -> None:
        import pyarrow
        from pyarrow import parquet

        self.path = path
        self.arrow: Any = pyarrow
        self.damaged = (OSError, pyarrow.ArrowException)
        with _errors(path, (pyarrow.ArrowException,), "is no Parquet file, or truncated"):
            self.file = parquet.ParquetFile(path)
        kinds, schema = pyarrow.types, self.file.schema_arrow
        types = {name: schema.field(name).type for name in dict.fromkeys(schema.names)}
        self.features = [
            name
            for name, kind in types.items()
            if kinds.is_integer(kind.value_type if self._is_list(kind) else kind)
        ]
        checks = (kinds.is_integer, kinds.is_floating, kinds.is_timestamp, kinds.is_date)
        self.times = [n for n, kind in types.items() if any(check(kind) for check in checks)]

    def _parts(self, read: Sequence[str], rows: int) -> Iterator[tuple[int, Any]]:
        for batch in self.file.iter_batches(batch_size=rows, columns=read):
            yield batch.num_rows, batch

    def _is_list(self, kind: Any) -> bool:
        kinds = self.arrow.types
        checks = (kinds.is_list, kinds.is_large_list, kinds.is_fixed_size_list)
        return any(check(kind) for check in checks)

    def _when(self, part: Any, name: str, first: int) -> Times:
        column = part.column(name)
        if column.null_count:
            row = first + int(np.flatnonzero(np.asarray(column.is_null()))[0])
            raise InputError(
                f"{self.path}, row {row}: {name}: got a null; give every sample a time"
            )
        kinds = self.arrow.types
        if kinds.is_timestamp(column.type) or kinds.is_date(column.type):
            exact = column.cast(self.arrow.timestamp("us")).cast(self.arrow.int64())
            return np.asarray(exact.to_numpy(zero_copy_only=False), dtype=np.float64) / 1e6
        return seconds(column.to_numpy(zero_copy_only=False))

    def _bags(self, part: Any, name: str, first: int) -> Bags:
        column, where = part.column(name), f"{self.path}: {name}"
        if not self._is_list(column.type):
            valid = ~np.asarray(column.is_null())
            ids = whole_numbers(column.drop_null().to_numpy(zero_copy_only=False), where)
            return Bags(ids) if valid.all() else Bags(ids, valid.astype(np.int64))
        values = column.flatten()
        lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        lengths = lengths.astype(np.int64)
        if values.null_count:
            missing = int(np.flatnonzero(np.asarray(values.is_null()))[0])
            raise InputError(
                f"{self.path}, row {first + sample_of(missing, lengths)}: {name}: got a null "
                "inside a list; ids must be integers"
            )
        return Bags(whole_numbers(values.to_numpy(zero_copy_only=False), where), lengths)


class TensorSource(Source):
    """Files that torch.save wrote, which torch loads whole: KeyedJaggedTensors, or indices, offsets
    and lengths of many tables. A chunk lies within one batch, so it may have fewer rows than asked
    for."""

    def __init__(self, path: Path) -> None:
        from shardopt.training.saved_batches import load_batches

        self.path = path
        self.batches = load_batches(path)
        self.features = self.batches[0].names if self.batches else []

    def _parts(self, read: Sequence[str], rows: int) -> Iterator[tuple[int, Any]]:
        for batch in self.batches:
            pick(self.path, batch.names, read)
            samples = batch.lengths.shape[1]
            edges = np.concatenate(([0], np.cumsum(batch.lengths.reshape(-1))))
            for at in range(0, samples, rows):
                lengths = batch.lengths[:, at : at + rows]
                yield lengths.shape[1], (batch, lengths, edges[at::samples])

    def _bags(self, part: Any, name: str, first: int) -> Bags:
        batch, lengths, starts = part
        at = batch.names.index(name)
        ids = batch.ids[starts[at] : starts[at] + int(lengths[at].sum())]
        return Bags(whole_numbers(ids, f"{self.path}: {name}"), lengths[at])


SEPARATOR = re.compile(r"[;\t|]")
"""Other separators than the comma, in a first line without any."""


class InterSource(Source):
    """RecBole's ``.inter`` files, one interaction a line, tabs between columns, and a first line
    such as ``user_id:token  item_ids:token_seq  timestamp:float``.

    Columns of tokens are features; their tokens must be whole numbers. Columns of single numbers
    may say when an interaction was, in Unix seconds. Source: RecBole's "atomic files"
    (https://recbole.io/docs/user_guide/data/atomic_files.html).
    """

    kinds = ("token", "token_seq", "float", "float_seq")

    unit, first = "line", 2

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns = self._columns()
        self.features = [name for name, kind in self.columns if kind in ("token", "token_seq")]
        self.times = [name for name, kind in self.columns if kind in self.when]

    when: tuple[str, ...] = ("float",)
    """Types of columns that may hold the time of a sample."""

    def _columns(self) -> list[tuple[str, str]]:
        """Read the name and type of each column."""
        path = self.path
        with self._open() as stream:
            head = stream.readline().rstrip("\r\n")
        typed = [column.rpartition(":") for column in head.split("\t")]
        columns = [(name, kind) for name, _, kind in typed]
        for name, kind in columns:
            if not name or kind not in self.kinds:
                raise InputError(
                    f"{path}:1: got the column '{name}:{kind}'; allowed: name:type with one of "
                    f"the types {', '.join(self.kinds)}, and tabs between columns"
                )
        return columns

    def _split(self, lines: Sequence[str]) -> list[list[str]]:
        """Split each line into its cells."""
        return [line.rstrip("\r\n").split("\t") for line in lines]

    def _parts(self, read: Sequence[str], rows: int) -> Iterator[tuple[int, Any]]:
        with self._open() as stream:
            stream.readline()
            while lines := list(islice(stream, rows)):
                yield len(lines), cache(partial(self._cells, lines))

    @contextmanager
    def _open(self) -> Iterator[TextIO]:
        with (
            _errors(self.path, (UnicodeDecodeError,), "is no UTF-8 text"),
            self.path.open(encoding="utf-8-sig") as stream,
        ):
            yield stream

    def _cells(self, lines: list[str], first: int) -> dict[str, list[str]]:
        rows = self._split(lines)
        self._check_width(rows, len(self.columns), first)
        return {name: [row[at] for row in rows] for at, (name, _) in enumerate(self.columns)}

    def _check_width(self, rows: Sequence[Sequence[str]], width: int, first: int) -> None:
        for number, row in enumerate(rows, start=first):
            if len(row) != width:
                raise InputError(
                    f"{self.path}:{number}: has {len(row)} columns; line 1 has {width}"
                )

    def _bags(self, part: Any, name: str, first: int) -> Bags:
        cells = part(first)[name]
        lengths = None
        if dict(self.columns)[name] == "token_seq":
            tokens = [cell.split() for cell in cells]
            lengths = np.array([len(each) for each in tokens], dtype=np.int64)
            cells = list(chain.from_iterable(tokens))
        samples = np.arange(len(cells))
        if lengths is not None:
            samples = np.repeat(np.arange(len(lengths)), lengths)
        return Bags(self._whole(cells, name, first + samples), lengths)

    def _whole(
        self, tokens: Sequence[str], name: str, lines: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Return the ids of a feature's tokens, each of a line of the file."""
        for line, token in zip(lines, tokens, strict=True):
            fine = token.isascii() and token.isdigit() and len(token) <= 20
            if not fine or int(token) > MAX_ID:
                raise InputError(
                    f"{self.path}:{line}: feature '{name}': got '{token[:60]}'; allowed: whole "
                    "numbers; number the tokens, or leave the column out of the features",
                    inputs=("features",),
                )
        return np.array(tokens, dtype=object).astype(np.int64)

    def _when(self, part: Any, name: str, first: int) -> Times:
        cells = part(first)[name]
        for line, cell in enumerate(cells, start=first):
            try:
                fine = math.isfinite(float(cell))
            except ValueError:
                fine = False
            if not fine:
                raise InputError(f"{self.path}:{line}: {name}: got '{cell}'; allowed: numbers")
        return seconds(np.array(cells, dtype=np.float64))


class CsvSource(InterSource):
    """Comma-separated values with a line of names, one interaction a line, such as the logs of
    KuaiRand (https://kuairand.com).

    Columns are features where the first samples have whole numbers, and may say when a sample was
    where they have numbers. An empty cell is a sample without an id.
    """

    when = ("token", "float")
    looked_at = 1000
    """Samples that decide which columns are features."""

    def _columns(self) -> list[tuple[str, str]]:
        with self._open() as stream:
            lines = list(islice(stream, 1 + self.looked_at))
        if len(lines) < 2:
            raise InputError(f"{self.path}: needs a line of column names and at least one sample")
        names, *rows = self._split(lines)
        if len(names) == 1 and (other := SEPARATOR.search(names[0])):
            raise InputError(
                f"{self.path}:1: got {lines[0].strip()[:60]!r}; columns must be separated by "
                f"commas, not by {other[0]!r}"
            )
        if all(map(str.isdigit, names)) or len({*names}) < len(names):
            raise InputError(
                f"{self.path}:1: got {lines[0].strip()[:60]!r}; the first line must name the "
                "columns, each once"
            )
        self._check_width(rows, len(names), self.first)

        def kind(cells: Sequence[str]) -> str:
            given = [cell for cell in cells if cell]
            whole = all(cell.isascii() and cell.isdigit() for cell in given)
            return "token" if given and whole else "float"

        return [
            (name, kind(cells)) for name, cells in zip(names, zip(*rows, strict=True), strict=True)
        ]

    def _split(self, lines: Sequence[str]) -> list[list[str]]:
        rows = list(csv.reader(lines))
        if len(rows) != len(lines):
            raise InputError(f"{self.path}: a quoted cell has several lines; allowed: one")
        return rows

    def _bags(self, part: Any, name: str, first: int) -> Bags:
        cells = part(first)[name]
        if all(cells):
            return super()._bags(part, name, first)
        given = np.array([bool(cell) for cell in cells])
        lines = first + np.flatnonzero(given)
        ids = self._whole([cell for cell in cells if cell], name, lines)
        return Bags(ids, given.astype(np.int64))
