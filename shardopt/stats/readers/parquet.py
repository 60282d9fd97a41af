"""Ids in Parquet columns: integers, or lists of integers for features with several ids."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from predictor.errors import InputError
from shardopt.files import read_problem
from shardopt.stats.counts import Bags
from shardopt.stats.source import Chunk, Times, seconds, whole_numbers


class ParquetSource:
    """A Parquet file. A null is a sample without an id; columns of other types are no features."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.arrow, parquet = _pyarrow()
        try:
            self.file = parquet.ParquetFile(path)
        except OSError as error:
            raise InputError(read_problem(path, "data file", error)) from None
        except self.arrow.ArrowException as error:
            raise InputError(f"{path}: is no Parquet file, or truncated: {error}") from None
        schema = self.file.schema_arrow
        self.types = {name: schema.field(name).type for name in dict.fromkeys(schema.names)}
        self.features: Sequence[str] = [n for n, kind in self.types.items() if self._ids(kind)]
        self.times: Sequence[str] = [n for n, kind in self.types.items() if self._is_time(kind)]

    def chunks(
        self, wanted: Sequence[str], rows: int, skip: int, time: str | None = None
    ) -> Iterator[Chunk]:
        """As `Source.chunks`."""
        first = 0
        try:
            read = list(dict.fromkeys([*wanted, *filter(None, [time])]))
            for batch in self.file.iter_batches(batch_size=rows, columns=read):
                if skip > 0:
                    skip -= 1
                else:
                    bags = {name: self._bags(batch.column(name), name, first) for name in wanted}
                    when = None if time is None else self._times(batch.column(time), time, first)
                    yield Chunk(first, "row", bags, when)
                first += batch.num_rows
        except (OSError, self.arrow.ArrowException) as error:
            raise InputError(
                f"{self.path}: cannot be read after row {first}, it is damaged: {error}"
            ) from None

    def _ids(self, kind: Any) -> bool:
        kinds = self.arrow.types
        return bool(kinds.is_integer(kind.value_type if _is_list(kinds, kind) else kind))

    def _is_time(self, kind: Any) -> bool:
        kinds = self.arrow.types
        return any(
            check(kind)
            for check in (kinds.is_integer, kinds.is_floating, kinds.is_timestamp, kinds.is_date)
        )

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
        if not _is_list(self.arrow.types, column.type):
            known = ~np.asarray(column.is_null())
            ids = whole_numbers(column.drop_null().to_numpy(zero_copy_only=False), where)
            return Bags(ids) if known.all() else Bags(ids, known.astype(np.int64))
        values = column.flatten()
        lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        lengths = lengths.astype(np.int64)
        if values.null_count:
            missing = int(np.flatnonzero(np.asarray(values.is_null()))[0])
            row = first + int(np.searchsorted(np.cumsum(lengths), missing, side="right"))
            raise InputError(
                f"{self.path}, row {row}: {name}: got a null inside a list; ids must be integers"
            )
        return Bags(whole_numbers(values.to_numpy(zero_copy_only=False), where), lengths)


def _is_list(kinds: Any, kind: Any) -> bool:
    return bool(kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind))


def _pyarrow() -> tuple[Any, Any]:
    import pyarrow
    from pyarrow import parquet

    return pyarrow, parquet
