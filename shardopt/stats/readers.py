"""Data files of all formats, read in chunks of samples.

A reader has the names of its sparse features, those of the columns that can say when a sample was,
and gives chunks of consecutive samples.
"""

from __future__ import annotations

import gzip
import math
import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, BinaryIO, TextIO, cast

import numpy as np
from numpy.typing import NDArray

from predictor.errors import InputError, did_you_mean
from predictor.files import open_input
from shardopt.files import read_problem
from shardopt.npz import BROKEN, Head, read_head
from shardopt.stats.counts import Bags

Times = NDArray[np.float64]
"""Unix seconds of some samples, ``[samples]``."""

CHUNK_ROWS = 65536
"""Samples that are read at once."""
MOST_FEATURES = 2**16
MOST_BYTES = 2**30
"""Of a chunk of samples of one feature."""
MAX_ID = 2**63 - 1


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


class Source(ABC):
    """A data file that is open for reading.

    Attributes:
        features: names of the sparse features, in the file's order.
        times: names of the columns that can say when a sample was.
    """

    path: Path
    features: Sequence[str]
    times: Sequence[str] = ()

    @abstractmethod
    def chunks(
        self, wanted: Sequence[str], rows: int, skip: int, time: str | None = None
    ) -> Iterator[Chunk]:
        """The samples in order.

        Args:
            wanted: some of ``features``.
            rows: samples of a chunk.
            skip: chunks to leave out at the start.
            time: which of ``times`` says when the samples were; None where nobody asks.

        Raises:
            InputError: names file, line or row, and feature.
        """


def open_source(path: Path, data_format: DataFormat | None) -> Source:
    """The reader of a file.

    Args:
        data_format: None if the file's name tells.

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
    }
    return readers[data_format or format_of(path)](path)


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
    if values.dtype == np.uint64 and values.size and int(values.max()) > MAX_ID:
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


@contextmanager
def _errors(
    path: Path, damaged: tuple[type[Exception], ...] = (), said: str = "is damaged or truncated"
) -> Iterator[None]:
    """Failures to read a file as errors that name it.

    Args:
        damaged: what its library raises where the content is wrong.
    """
    try:
        yield
    except damaged as error:
        raise InputError(f"{path}: {said}: {error}") from None
    except OSError as error:
        raise InputError(read_problem(path, "data file", error)) from None


def _row_of(at: int, lengths: NDArray[np.int64]) -> int:
    """The sample that the ``at``-th id of all lies in."""
    return int(np.searchsorted(np.cumsum(lengths), at, side="right"))


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

    def __init__(self, path: Path) -> None:
        self.path = path

    def chunks(
        self, wanted: Sequence[str], rows: int, skip: int, time: str | None = None
    ) -> Iterator[Chunk]:
        """As `Source.chunks`."""
        width, line = 0, 1
        opened = gzip.open if self.path.suffix == ".gz" else open
        damaged = (EOFError, gzip.BadGzipFile, zlib.error)
        with _errors(self.path, damaged), opened(self.path, "rb") as stream:
            while lines := list(islice(cast(BinaryIO, stream), rows)):
                width = width or lines[0].count(b"\t") + 1
                if width not in self.widths:
                    raise InputError(
                        f"{self.path}:1: has {width} columns; allowed: 40 (label, 13 integers, 26 "
                        "hexadecimal categories), or 39 without the label, separated by tabs"
                    )
                if skip > 0:
                    skip -= 1
                else:
                    yield Chunk(line, "line", self._parse(lines, line, width, wanted))
                line += len(lines)

    def _parse(
        self, lines: list[bytes], first: int, width: int, wanted: Sequence[str]
    ) -> dict[str, Bags]:
        end = b"" if lines[-1].endswith(b"\n") else b"\n"
        text = np.frombuffer((b"".join(lines) + end).replace(b"\r\n", b"\n"), dtype=np.uint8)
        breaks = np.flatnonzero((text == 9) | (text == 10))
        regular = len(breaks) == len(lines) * width
        if not regular or (text[breaks[width - 1 :: width]] != 10).any():
            for number, line in enumerate(lines, start=first):
                columns = line.count(b"\t") + 1
                if columns != width:
                    raise InputError(
                        f"{self.path}:{number}: has {columns} columns; line 1 has {width}, and all "
                        "lines must have as many"
                    )
        ends = breaks.reshape(len(lines), width)
        places = {name: width - 26 + self.features.index(name) for name in wanted}
        return {
            name: Bags(self._column(text, ends[:, at - 1] + 1, ends[:, at], first, name))
            for name, at in places.items()
        }

    def _column(
        self,
        text: NDArray[np.uint8],
        start: NDArray[np.intp],
        end: NDArray[np.intp],
        first: int,
        name: str,
    ) -> NDArray[np.int64]:
        length = end - start
        ids = np.zeros(len(end), dtype=np.int64)
        wrong = length > self.max_digits
        for at in range(min(int(length.max()), self.max_digits)):
            there = np.flatnonzero(length > at)
            digit = _DIGITS[text[start[there] + at]]
            wrong[there[digit == 255]] = True
            ids[there] = ids[there] * 16 + digit
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            given = bytes(text[start[row] : end[row]]).decode("utf-8", errors="replace")
            raise InputError(
                f"{self.path}:{first + row}: {name}: got {given!r}; allowed: a hexadecimal "
                f"number of at most {self.max_digits} digits, or nothing, which counts as id 0"
            )
        return ids


_DIGITS = np.full(256, 255, dtype=np.uint8)
for _character in b"0123456789abcdefABCDEF":
    _DIGITS[_character] = int(chr(_character), 16)


class NpySource(Source):
    """Integers ``[samples, features]``, as ``day_0_sparse.npy`` of the preprocessed Criteo 1TB
    data; features are called cat_0, cat_1, ..."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _errors(path, BROKEN, "is no .npy file of numbers, or truncated"):
            self.array = _map(path)
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


class NpzSource(Source):
    """An array ``[samples, ids]`` or ``[samples]`` of integers a feature.

    Source: ``day_0_sparse_multi_hot.npz`` of MLPerf's DLRM-DCNv2, whose arrays are called 0 to 25
    (mlcommons/training, materialize_synthetic_multihot_dataset.py); such are cat_0 to cat_25 here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.heads: dict[str, tuple[str, Head]] = {}
        said = "is no .npz file, or truncated"
        with _errors(path, BROKEN, said), zipfile.ZipFile(path) as archive:
            for member in archive.namelist():
                stem = member.removesuffix(".npy")
                if stem != member:
                    name = f"cat_{stem}" if stem.isdigit() else stem
                    self.heads[name] = member, self._head(archive, member, name)
        self.features = list(self.heads)
        self.times = [name for name, (_, head) in self.heads.items() if _width(head) == 1]

    def chunks(
        self, wanted: Sequence[str], rows: int, skip: int, time: str | None = None
    ) -> Iterator[Chunk]:
        """As `Source.chunks`; arrays are read side by side, a chunk at a time."""
        if not wanted:
            return
        read = list(dict.fromkeys([*wanted, *filter(None, [time])]))
        total = self._samples(read)
        with _errors(self.path, BROKEN), ExitStack() as stack:
            archive = stack.enter_context(zipfile.ZipFile(self.path))
            streams = {}
            for name in read:
                member, head = self.heads[name]
                stream = streams[name] = stack.enter_context(archive.open(member))
                read_head(stream)
                size = _width(head) * head.dtype.itemsize
                stream.seek(stream.tell() + skip * rows * size)
            for first in range(skip * rows, total, rows):
                count = min(rows, total - first)
                bags = {name: self._bags(streams[name], name, count) for name in read}
                when = None if time is None else seconds(bags[time].ids)
                yield Chunk(first, "row", {name: bags[name] for name in wanted}, when)

    def _head(self, archive: zipfile.ZipFile, member: str, name: str) -> Head:
        with archive.open(member) as stream:
            head = read_head(stream)
        shape = head.shape
        if len(shape) not in (1, 2) or (head.fortran and len(shape) == 2 and min(shape) > 1):
            raise InputError(
                f"{self.path}: {name}: has the shape {shape}; allowed: [samples, ids] or [samples],"
                " in C order"
            )
        if _width(head) * head.dtype.itemsize * CHUNK_ROWS > MOST_BYTES:
            raise InputError(f"{self.path}: {name}: has {_width(head)} ids a sample, too many")
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
        each = _width(head)
        size = count * each * head.dtype.itemsize
        raw = stream.read(size)
        if len(raw) < size:
            raise EOFError(f"{name} ends early")
        ids = whole_numbers(np.frombuffer(raw, dtype=head.dtype), f"{self.path}: {name}")
        return Bags(ids) if each == 1 else Bags(ids, np.full(count, each, dtype=np.int64))


def _width(head: Head) -> int:
    """Ids of a sample."""
    return head.shape[1] if len(head.shape) == 2 else 1


class ParquetSource(Source):
    """Parquet columns: integers, or lists of integers for features with several ids. A null is a
    sample without an id; columns of other types are no features."""

    def __init__(self, path: Path) -> None:
        import pyarrow
        from pyarrow import parquet

        self.path = path
        self.arrow: Any = pyarrow
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

    def chunks(
        self, wanted: Sequence[str], rows: int, skip: int, time: str | None = None
    ) -> Iterator[Chunk]:
        """As `Source.chunks`."""
        first = 0
        read = list(dict.fromkeys([*wanted, *filter(None, [time])]))
        with _errors(self.path, (OSError, self.arrow.ArrowException)):
            for batch in self.file.iter_batches(batch_size=rows, columns=read):
                if skip > 0:
                    skip -= 1
                else:
                    bags = {name: self._bags(batch.column(name), name, first) for name in wanted}
                    when = None if time is None else self._times(batch.column(time), time, first)
                    yield Chunk(first, "row", bags, when)
                first += batch.num_rows

    def _is_list(self, kind: Any) -> bool:
        kinds = self.arrow.types
        checks = (kinds.is_list, kinds.is_large_list, kinds.is_fixed_size_list)
        return any(check(kind) for check in checks)

    def _times(self, column: Any, name: str, first: int) -> Times:
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

    def _bags(self, column: Any, name: str, first: int) -> Bags:
        where = f"{self.path}: {name}"
        if not self._is_list(column.type):
            known = ~np.asarray(column.is_null())
            ids = whole_numbers(column.drop_null().to_numpy(zero_copy_only=False), where)
            return Bags(ids) if known.all() else Bags(ids, known.astype(np.int64))
        values = column.flatten()
        lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        lengths = lengths.astype(np.int64)
        if values.null_count:
            missing = int(np.flatnonzero(np.asarray(values.is_null()))[0])
            raise InputError(
                f"{self.path}, row {first + _row_of(missing, lengths)}: {name}: got a null inside "
                "a list; ids must be integers"
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

    def chunks(
        self, wanted: Sequence[str], rows: int, skip: int, time: str | None = None
    ) -> Iterator[Chunk]:
        """As `Source.chunks`."""
        row = 0
        for batch in self.batches:
            pick(self.path, batch.names, wanted)
            samples = batch.lengths.shape[1]
            edges = np.concatenate(([0], np.cumsum(batch.lengths.reshape(-1))))
            for first in range(0, samples, rows):
                if skip > 0:
                    skip -= 1
                    continue
                bags = {}
                for name in wanted:
                    at = batch.names.index(name)
                    lengths = batch.lengths[at, first : first + rows]
                    start = edges[at * samples + first]
                    ids = batch.ids[start : start + int(lengths.sum())]
                    bags[name] = Bags(whole_numbers(ids, f"{self.path}: {name}"), lengths)
                yield Chunk(row + first, "row", bags)
            row += samples


class InterSource(Source):
    """RecBole's ``.inter`` files, one interaction a line, tabs between columns, and a first line
    such as ``user_id:token  item_ids:token_seq  timestamp:float``.

    Columns of tokens are features; their tokens must be whole numbers. Columns of single numbers
    may say when an interaction was, in Unix seconds. Source: RecBole's "atomic files"
    (https://recbole.io/docs/user_guide/data/atomic_files.html).
    """

    kinds = ("token", "token_seq", "float", "float_seq")

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as stream:
            head = stream.readline().rstrip("\r\n")
        typed = [column.rpartition(":") for column in head.split("\t")]
        self.columns = [(name, kind) for name, _, kind in typed]
        for name, kind in self.columns:
            if not name or kind not in self.kinds:
                raise InputError(
                    f"{path}:1: got the column '{name}:{kind}'; allowed: name:type with one of "
                    f"the types {', '.join(self.kinds)}, and tabs between columns"
                )
        self.features = [name for name, kind in self.columns if kind in ("token", "token_seq")]
        self.times = [name for name, kind in self.columns if kind == "float"]

    def chunks(
        self, wanted: Sequence[str], rows: int, skip: int, time: str | None = None
    ) -> Iterator[Chunk]:
        """As `Source.chunks`."""
        line = 2
        with self._open() as stream:
            stream.readline()
            while lines := list(islice(stream, rows)):
                if skip > 0:
                    skip -= 1
                else:
                    yield self._chunk(lines, line, wanted, time)
                line += len(lines)

    @contextmanager
    def _open(self) -> Iterator[TextIO]:
        with (
            _errors(self.path, (UnicodeDecodeError,), "is no UTF-8 text"),
            self.path.open(encoding="utf-8-sig") as stream,
        ):
            yield stream

    def _chunk(
        self, lines: list[str], first: int, wanted: Sequence[str], time: str | None
    ) -> Chunk:
        rows = [line.rstrip("\r\n").split("\t") for line in lines]
        for number, row in enumerate(rows, start=first):
            if len(row) != len(self.columns):
                raise InputError(
                    f"{self.path}:{number}: has {len(row)} columns; line 1 has {len(self.columns)}"
                )
        cells = {name: [row[at] for row in rows] for at, (name, _) in enumerate(self.columns)}
        bags = {name: self._bags(cells[name], name, first) for name in wanted}
        when = None if time is None else self._times(cells[time], time, first)
        return Chunk(first, "line", bags, when)

    def _bags(self, cells: list[str], name: str, first: int) -> Bags:
        lengths = None
        if dict(self.columns)[name] == "token_seq":
            tokens = [cell.split() for cell in cells]
            lengths = np.array([len(each) for each in tokens], dtype=np.int64)
            cells = list(chain.from_iterable(tokens))
        for at, token in enumerate(cells):
            fine = token.isascii() and token.isdigit() and len(token) <= 20
            if not fine or int(token) > MAX_ID:
                line = first + (at if lengths is None else _row_of(at, lengths))
                raise InputError(
                    f"{self.path}:{line}: feature '{name}': got '{token[:60]}'; allowed: whole "
                    "numbers; number the tokens, or leave the column out of the features",
                    inputs=("features",),
                )
        return Bags(np.array(cells, dtype=object).astype(np.int64), lengths)

    def _times(self, cells: list[str], name: str, first: int) -> Times:
        for line, cell in enumerate(cells, start=first):
            try:
                fine = math.isfinite(float(cell))
            except ValueError:
                fine = False
            if not fine:
                raise InputError(f"{self.path}:{line}: {name}: got '{cell}'; allowed: numbers")
        return seconds(np.array(cells, dtype=np.float64))
