"""Reads data files into counts: features, ranges of ids, and a state that survives being killed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from predictor.errors import InputError, did_you_mean
from shardopt.files import atomic_open, read_problem
from shardopt.npz import BROKEN, load_arrays
from shardopt.stats.counts import Bags, FeatureCounts
from shardopt.stats.source import CHUNK_ROWS, Chunk, DataFormat, Source, format_of, pick

CHECKPOINT_CHUNKS = 32
"""Chunks between two checkpoints."""
MAX_IDS = 2**20
MOST_CHECKPOINT = 2**30
"""Bytes of a checkpoint: a hundred features with `MAX_IDS` ids each."""
SCHEMA = "shardopt.stats-checkpoint/1"

OnChunk = Callable[[Path, int], None]


@dataclass(frozen=True)
class ReadOptions:
    """What to read and how.

    Args:
        features: to count; None for those of ``rows`` that the first file has, or else all of it.
        rows: of each feature's table, or of every table; None where nothing limits the ids.
        modulo: take ids modulo the rows, as hashing does.
        max_ids: distinct ids of a feature that are counted exactly, >= 1.
        chunk_rows: samples read at once, >= 1.
        data_format: None if the file names tell.
    """

    features: tuple[str, ...] | None = None
    rows: Mapping[str, int] | int | None = None
    modulo: bool = False
    max_ids: int = MAX_IDS
    chunk_rows: int = CHUNK_ROWS
    data_format: DataFormat | None = None

    def rows_of(self, feature: str) -> int | None:
        """Rows of a feature's table, if given."""
        return self.rows[feature] if isinstance(self.rows, Mapping) else self.rows


def collect(
    paths: Sequence[Path],
    reading: ReadOptions,
    *,
    checkpoint: Path | None = None,
    every: int = CHECKPOINT_CHUNKS,
    on_chunk: OnChunk = lambda path, samples: None,
) -> dict[str, FeatureCounts]:
    """Count the ids of every feature over all files.

    Args:
        paths: data files, read in this order.
        checkpoint: where the state is saved after every ``every`` chunks; if it is there, reading
            goes on from it.
        on_chunk: called after each chunk with its file and the samples so far.

    Raises:
        InputError: data or checkpoint cannot be used; names file, line or row, and feature.
    """
    opened = [_open(paths[0], reading)]
    wanted = _choose_features(paths[0], opened[0], reading)
    counts = {name: FeatureCounts(reading.max_ids) for name in wanted}
    key = _key(paths, reading, wanted)
    done = (0, 0)
    if checkpoint is not None and checkpoint.exists():
        done, counts = _load(checkpoint, key, wanted)
    since = 0
    for number, path in enumerate(paths):
        if number < done[0]:
            continue
        source = opened[0] if number == 0 else _open(path, reading)
        pick(path, source.features, wanted)
        before = _samples(counts)
        skip = done[1] if number == done[0] else 0
        chunks = source.chunks(wanted, reading.chunk_rows, skip)
        for read, chunk in enumerate(chunks, start=skip + 1):
            for name, bags in _check_ids(path, chunk, reading):
                counts[name].add(bags)
            since += 1
            if checkpoint is not None and since % every == 0:
                _save(checkpoint, key, (number, read), counts)
            on_chunk(path, _samples(counts))
        if not skip and _samples(counts) == before:
            raise InputError(f"{path}: has no samples; give a file that has some")
    return counts


def _open(path: Path, reading: ReadOptions) -> Source:
    """Raises InputError where the file is missing, or not of its format."""
    try:
        with path.open("rb"):
            pass
    except (OSError, ValueError) as error:
        raise InputError(read_problem(path, "data file", error)) from None
    match reading.data_format or format_of(path):
        case DataFormat.TSV:
            from shardopt.stats.tsv import TsvSource

            return TsvSource(path)
        case DataFormat.NPY:
            from shardopt.stats.arrays import NpySource

            return NpySource(path)
        case DataFormat.NPZ:
            from shardopt.stats.arrays import NpzSource

            return NpzSource(path)
        case DataFormat.PARQUET:
            from shardopt.stats.parquet import ParquetSource

            return ParquetSource(path)
        case DataFormat.TORCH:
            from shardopt.stats.tensors import TensorSource

            return TensorSource(path)


def _choose_features(path: Path, source: Source, reading: ReadOptions) -> list[str]:
    rows = reading.rows if isinstance(reading.rows, Mapping) else None
    if not source.features:
        raise InputError(f"{path}: has no features with integer ids")
    wanted = list(dict.fromkeys(reading.features or rows or source.features))
    if reading.features is None:
        wanted = [name for name in wanted if name in source.features] or wanted
    pick(path, source.features, wanted)
    for name in wanted:
        if rows is not None and name not in rows:
            raise InputError(
                f"feature '{name}': no rows of its table are given{did_you_mean(name, rows)}; "
                f"they are for: {', '.join(list(rows)[:30])}"
            )
    return wanted


def _samples(counts: Mapping[str, FeatureCounts]) -> int:
    return next(iter(counts.values())).samples


def _check_ids(path: Path, chunk: Chunk, reading: ReadOptions) -> Iterator[tuple[str, Bags]]:
    """The bags of a chunk with ids that their tables have."""
    for name, bags in chunk.bags.items():
        rows = reading.rows_of(name)
        if reading.modulo and rows is not None:
            yield name, Bags(bags.ids % rows, bags.lengths)
            continue
        wrong = bags.ids < 0
        if rows is not None:
            wrong |= bags.ids >= rows
        if wrong.any():
            message = _out_of_range(path, chunk, name, int(np.flatnonzero(wrong)[0]), rows)
            raise InputError(message, inputs=("table_rows", "modulo"))
        yield name, bags


def _out_of_range(path: Path, chunk: Chunk, name: str, at: int, rows: int | None) -> str:
    bags = chunk.bags[name]
    sample = at
    if bags.lengths is not None:
        sample = int(np.searchsorted(np.cumsum(bags.lengths), at, side="right"))
    allowed = "0 and up" if rows is None else f"0 to {rows - 1}, as its table has {rows} rows"
    return (
        f"{path}, {chunk.unit} {chunk.first + sample}: feature '{name}': got the id "
        f"{bags.ids[at]}; allowed: {allowed}; give the right number of rows, or take ids modulo it"
    )


def _key(paths: Sequence[Path], reading: ReadOptions, wanted: Sequence[str]) -> str:
    """What a checkpoint must have been made from."""
    files = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    rows = {name: reading.rows_of(name) for name in wanted}
    return json.dumps(
        [SCHEMA, files, rows, reading.modulo, reading.max_ids, reading.chunk_rows],
    )


def _save(path: Path, key: str, done: tuple[int, int], counts: Mapping[str, FeatureCounts]) -> None:
    arrays = {"key": np.array(key), "done": np.array(done, dtype=np.int64)}
    for number, found in enumerate(counts.values()):
        arrays |= {f"{number}.{name}": value for name, value in found.state().items()}
    with atomic_open(path) as stream:
        np.savez(stream, allow_pickle=False, **arrays)


def _load(
    path: Path, key: str, wanted: Sequence[str]
) -> tuple[tuple[int, int], dict[str, FeatureCounts]]:
    """Files and chunks that are done, and what was counted in them."""
    try:
        arrays = load_arrays(path, MOST_CHECKPOINT)
    except (OSError, *BROKEN) as error:
        raise InputError(f"{path}: is no checkpoint of shardopt stats: {error}") from None
    if str(arrays.get("key")) != key:
        raise InputError(
            f"{path}: is a checkpoint of other data or options; delete it or use another file",
            inputs=("checkpoint",),
        )
    counts = {}
    try:
        for number, name in enumerate(wanted):
            mine = f"{number}."
            state = {k.removeprefix(mine): v for k, v in arrays.items() if k.startswith(mine)}
            counts[name] = FeatureCounts.of_state(state)
        return (int(arrays["done"][0]), int(arrays["done"][1])), counts
    except (TypeError, ValueError, LookupError) as error:
        raise InputError(f"{path}: is a damaged checkpoint: {error}; delete it") from None
