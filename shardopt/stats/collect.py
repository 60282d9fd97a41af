"""Counts the ids of data files by feature and window of time, with checkpoints."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from predictor.errors import InputError, did_you_mean
from shardopt.files import atomic_open
from shardopt.npz import BROKEN, load_arrays
from shardopt.stats.counts import Bags, FeatureCounts, sample_of
from shardopt.stats.readers import CHUNK_ROWS, Chunk, DataFormat, Source, open_source, pick

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
MOST_WINDOWS = 1000
"""Most windows of time; each has its own counts, of up to `MAX_IDS` ids a feature."""
_WORDS = re.compile(r"(?P<column>.+)=(?P<count>[1-9]\d{0,5})(?P<unit>[smhdw])", re.ASCII)


@dataclass(frozen=True)
class TimeWindow:
    """Division of samples by time.

    Args:
        column: time of a sample.
        seconds: length of a window; windows are counted from 1970-01-01, 00:00 UTC.
    """

    column: str
    seconds: int

    @classmethod
    def parse(cls, text: str) -> TimeWindow:
        """Read a window written as ``COLUMN=1d``.

        Raises:
            InputError: the text has another form.
        """
        match = _WORDS.fullmatch(text)
        if match is None:
            raise InputError(
                f"got the window '{text}'; allowed: COLUMN=LENGTH, where LENGTH is a whole number "
                f"and one of {', '.join(UNITS)}, such as timestamp=1d",
                inputs=("window",),
            )
        return cls(match["column"], int(match["count"]) * UNITS[match["unit"]])

    def split(self, chunk: Chunk) -> Iterator[tuple[int, Chunk]]:
        """Yield the samples of each window that has some, with its start in Unix seconds.

        Raises:
            InputError: a time lies outside the years 1 to 9999.
        """
        assert chunk.times is not None
        starts = np.floor(chunk.times / self.seconds) * self.seconds
        for start in np.unique(starts).tolist():
            try:
                datetime.fromtimestamp(start, UTC)
            except (ValueError, OverflowError, OSError):
                raise InputError(
                    f"column '{self.column}': got the time {start:g}; allowed: seconds, or milli-, "
                    "micro- or nanoseconds, since 1970",
                    inputs=("window",),
                ) from None
            inside = starts == start
            bags = {name: _part(own, inside) for name, own in chunk.bags.items()}
            yield int(start), Chunk(chunk.first, chunk.unit, bags)

    def name(self, start: int) -> str:
        """Name a window in files: its day, with the time where windows are shorter."""
        at = datetime.fromtimestamp(start, UTC)
        whole_days = self.seconds % UNITS["d"] == 0
        return at.strftime("%Y-%m-%d" if whole_days else "%Y-%m-%dT%H-%M-%S")


def _part(bags: Bags, inside: np.ndarray) -> Bags:
    """Select the bags of some samples, ``inside [samples]``."""
    if bags.lengths is None:
        return Bags(bags.ids[inside])
    return Bags(bags.ids[np.repeat(inside, bags.lengths)], bags.lengths[inside])


CHECKPOINT_CHUNKS = 32
"""Chunks between two checkpoints."""
MAX_IDS = 2**20
MOST_CHECKPOINT = 2**30
"""Most bytes of a checkpoint: a hundred features with `MAX_IDS` ids each."""
SCHEMA = "shardopt.stats-checkpoint/3"
WHOLE = 0
"""Key of the single window of data that is not divided by time."""

OnChunk = Callable[[Path, int], None]
Windows = dict[int, dict[str, FeatureCounts]]
"""Start in Unix seconds -> feature -> counts."""


@dataclass(frozen=True)
class ReadOptions:
    """Features to read, rows of their tables, and the way of reading.

    Args:
        features: to count; None: the features of ``rows`` that the first file has, or else all of
            the file.
        rows: of each feature's table, or of every table; None: ids have no limit.
        modulo: take ids modulo the rows, as hashing does.
        max_ids: distinct ids of a feature that are counted exactly, >= 1.
        chunk_rows: samples read at once, >= 1.
        data_format: None: by the file names.
        window: windows of time to count separately; None counts all samples together.
    """

    features: tuple[str, ...] | None = None
    rows: Mapping[str, int] | int | None = None
    modulo: bool = False
    max_ids: int = MAX_IDS
    chunk_rows: int = CHUNK_ROWS
    data_format: DataFormat | None = None
    window: TimeWindow | None = None

    def rows_of(self, feature: str) -> int | None:
        """Return the rows of a feature's table, if given."""
        return self.rows[feature] if isinstance(self.rows, Mapping) else self.rows


def collect(
    paths: Sequence[Path],
    reading: ReadOptions,
    *,
    checkpoint: Path | None = None,
    every: int = CHECKPOINT_CHUNKS,
    on_chunk: OnChunk = lambda path, samples: None,
) -> dict[int, dict[str, FeatureCounts]]:
    """Count the ids of every feature over all files.

    Args:
        paths: data files, read in this order.
        checkpoint: file for the state, saved after every ``every`` chunks; if it exists, reading
            goes on from it.
        on_chunk: called after each chunk with its file and the samples so far.

    Returns:
        Start of a window of time -> feature -> counts, in order of time; `WHOLE` is the only key
        without windows.

    Raises:
        InputError: data or checkpoint cannot be used; names file, line or row, and feature.
    """
    first = open_source(paths[0], reading.data_format)
    features = _choose_features(paths[0], first, reading)
    counts: Windows = {}
    key = _key(paths, reading, features)
    done = (0, 0)
    if checkpoint is not None and checkpoint.exists():
        done, counts = _load(checkpoint, key, features)
    since = 0
    time = None if reading.window is None else reading.window.column
    for number, path in enumerate(paths):
        if number < done[0]:
            continue
        source = first if number == 0 else open_source(path, reading.data_format)
        pick(path, source.features, features)
        if time is not None and time not in source.times:
            raise InputError(
                f"{path}: has no column '{time}' of times{did_you_mean(time, source.times)}; it "
                f"has: {', '.join(source.times[:30]) or 'none'}",
                inputs=("window",),
            )
        before = _samples(counts)
        skip = done[1] if number == done[0] else 0
        chunks = source.chunks(features, reading.chunk_rows, skip, time)
        for read, chunk in enumerate(chunks, start=skip + 1):
            _add(counts, path, chunk, reading, features)
            since += 1
            if checkpoint is not None and since % every == 0:
                _save(checkpoint, key, (number, read), counts)
            on_chunk(path, _samples(counts))
        if not skip and _samples(counts) == before:
            raise InputError(f"{path}: has no samples; give a file that has some")
    return dict(sorted(counts.items()))


def _add(
    counts: Windows, path: Path, chunk: Chunk, reading: ReadOptions, features: Sequence[str]
) -> None:
    """Count a chunk in the windows that its samples lie in."""
    bags = {name: _check_ids(path, chunk, name, reading) for name in chunk.bags}
    checked = replace(chunk, bags=bags)
    parts = [(WHOLE, checked)] if reading.window is None else reading.window.split(checked)
    for start, part in parts:
        if start not in counts:
            if len(counts) == MOST_WINDOWS:
                raise InputError(
                    f"{path}: the samples lie in more than {MOST_WINDOWS} windows of time; choose "
                    "longer ones",
                    inputs=("window",),
                )
            counts[start] = {name: FeatureCounts(reading.max_ids) for name in features}
        together = np.sum([bag.counts for bag in part.bags.values()], axis=0)
        for name, bag in part.bags.items():
            counts[start][name].add(bag, together)


def _choose_features(path: Path, source: Source, reading: ReadOptions) -> list[str]:
    rows = reading.rows if isinstance(reading.rows, Mapping) else None
    if not source.features:
        raise InputError(f"{path}: has no features with integer ids")
    features = list(dict.fromkeys(reading.features or rows or source.features))
    if reading.features is None:
        features = [name for name in features if name in source.features] or features
        time = None if reading.window is None else reading.window.column
        features = [name for name in features if name != time] or features
    pick(path, source.features, features)
    for name in features:
        if rows is not None and name not in rows:
            raise InputError(
                f"feature '{name}': no rows of its table are given{did_you_mean(name, rows)}; "
                f"they are for: {', '.join(list(rows)[:30])}"
            )
    return features


def _samples(counts: Windows) -> int:
    return sum(next(iter(features.values())).samples for features in counts.values())


def _check_ids(path: Path, chunk: Chunk, name: str, reading: ReadOptions) -> Bags:
    """Return the bags of a feature after checking that its table has the ids."""
    bags, rows = chunk.bags[name], reading.rows_of(name)
    if reading.modulo and rows is not None:
        return Bags(bags.ids % rows, bags.lengths)
    wrong = bags.ids < 0
    if rows is not None:
        wrong |= bags.ids >= rows
    if not wrong.any():
        return bags
    at = int(np.flatnonzero(wrong)[0])
    sample = sample_of(at, bags.lengths)
    allowed = "0 and up" if rows is None else f"0 to {rows - 1}, as its table has {rows} rows"
    raise InputError(
        f"{path}, {chunk.unit} {chunk.first + sample}: feature '{name}': got the id "
        f"{bags.ids[at]}; allowed: {allowed}; give the right number of rows, or take ids modulo it",
        inputs=("table_rows", "modulo"),
    )


def _key(paths: Sequence[Path], reading: ReadOptions, features: Sequence[str]) -> str:
    """Return the key that ties a checkpoint to its files and options."""
    files = [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    rows = {name: reading.rows_of(name) for name in features}
    window = None if reading.window is None else [reading.window.column, reading.window.seconds]
    return json.dumps(
        [SCHEMA, files, rows, reading.modulo, reading.max_ids, reading.chunk_rows, window]
    )


def _save(path: Path, key: str, done: tuple[int, int], counts: Windows) -> None:
    arrays = {"key": np.array(key), "done": np.array(done, dtype=np.int64)}
    arrays["windows"] = np.array(list(counts), dtype=np.int64)
    for start, features in counts.items():
        for number, feature_counts in enumerate(features.values()):
            mine = f"{start}.{number}"
            arrays |= {f"{mine}.{name}": value for name, value in feature_counts.state().items()}
    with atomic_open(path, update=True) as stream:
        np.savez(stream, allow_pickle=False, **arrays)


def _load(path: Path, key: str, features: Sequence[str]) -> tuple[tuple[int, int], Windows]:
    """Load the number of files and chunks done, and their counts."""
    try:
        arrays = load_arrays(path, MOST_CHECKPOINT)
    except (OSError, *BROKEN) as error:
        raise InputError(f"{path}: is no checkpoint of shardopt stats: {error}") from None
    if str(arrays.get("key")) != key:
        raise InputError(
            f"{path}: is a checkpoint of other data or options; delete it or use another file",
            inputs=("checkpoint",),
        )
    counts: Windows = {}
    states = defaultdict[str, dict[str, np.ndarray]](dict)
    for name, array in arrays.items():
        mine, _, field = name.rpartition(".")
        states[mine][field] = array
    try:
        for start in map(int, arrays["windows"]):
            counts[start] = {
                name: FeatureCounts.of_state(states[f"{start}.{number}"])
                for number, name in enumerate(features)
            }
        return (int(arrays["done"][0]), int(arrays["done"][1])), counts
    except (TypeError, ValueError, LookupError) as error:
        raise InputError(f"{path}: is a damaged checkpoint: {error}; delete it") from None
