"""Index distributions of model.yaml, and windows of data: the same model with the statistics of
several days or hours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from predictor.document import KeyPath, Problems, shown
from predictor.errors import InputError, did_you_mean
from predictor.model.distribution import Distribution, Empirical, EmpiricalByRange, Uniform
from predictor.model.workload import Feature, Workload
from predictor.section import Name, Section, check
from shardopt.files import refuse_streams
from shardopt.npz import BROKEN, load_arrays

MAX_WINDOWS = 256
"""Most windows of data; each is read with the whole model."""


@dataclass(frozen=True)
class StatsFile(Section):
    """Bins measured from data, in an .npz file that `shardopt stats` wrote."""

    file: Name
    """An .npz file with <feature>.counts and <feature>.weights."""
    feature: Name | None = None
    """Name of the feature in the file; its own unless given."""


@dataclass(frozen=True)
class StatsWindows(Section):
    """Bins measured from data of several windows in order of time, a file each."""

    files: Annotated[tuple[Name, ...], Field(max_length=MAX_WINDOWS)]
    """Two or more .npz files, one for each window."""
    feature: Name | None = None
    """Name of the feature in the files; its own unless given."""


def names_files(raw: object) -> bool:
    """Tell if an index distribution lies in files of its own."""
    return isinstance(raw, dict) and ("file" in raw or "files" in raw)


CORRELATION = "length_correlation"
LENGTHS = {
    "pooling_factor": (1e-300, 1e300),
    "pooling_factor_std": (0.0, 1e300),
    "pooling_factor_max": (1e-300, 1e300),
    CORRELATION: (0.0, 1.0),
}
"""Facts that stats files and features hold on the ids of a sample, and the range of each."""
MOST_BYTES = 2**26
"""Largest stats file; those of forty features have a few hundred kilobytes."""


@dataclass
class DistributionReader:
    """Reads index distributions; every stats file is opened once.

    Args:
        directory: what file names are relative to.
        problems: where errors go.
        window: which of the files is read where a feature has several.
        windows: these files, of the first such feature.
    """

    directory: Path
    problems: Problems
    window: int = 0
    windows: tuple[str, ...] = ()
    _files: dict[str, dict[str, NDArray[np.float64]] | None] = field(default_factory=dict)

    def read(self, raw: dict[str, Any], path: KeyPath, feature: str) -> Distribution:
        """The distribution that files hold; uniform when it has a problem.

        Args:
            raw: a mapping of `StatsFile`, or of `StatsWindows`.
            path: where it stands.
            feature: name of the feature it describes.
        """
        if "files" in raw:
            return self._window(raw, path, feature) or Uniform()
        stats = check(StatsFile, raw, path, self.problems)
        measured = stats and self._measured(stats.file, stats.feature or feature, path)
        return measured or Uniform()

    def _window(self, raw: dict[str, Any], path: KeyPath, feature: str) -> Distribution | None:
        windows = check(StatsWindows, raw, path, self.problems)
        if windows is None:
            return None
        files = windows.files
        self.windows = self.windows or files
        if len({*files}) >= 2 and len(files) == len(self.windows):
            return self._measured(files[self.window], windows.feature or feature, path, "files")
        problem = "windows need two or more different files; write {file: ...} for one"
        if len({*files}) >= 2:
            problem = (
                f"has {len(files)} windows, but the first feature with windows has "
                f"{len(self.windows)} ({', '.join(self.windows)})"
            )
        self.problems.add((*path, "files"), problem)
        return None

    def pooling_ratio(self, raw: dict[str, Any], feature: str) -> float:
        """Return the window's pooling factor over the first window's; 1 where the files do not
        say."""
        if "files" not in raw or not self.window:
            return 1.0
        name = str(raw.get("feature") or feature)
        first, now = (
            _lengths(self._load(raw["files"][window], ()) or {}, name).get("pooling_factor")
            for window in (0, self.window)
        )
        return now / first if now and first else 1.0

    def lengths(self, raw: dict[str, Any], feature: str, mean: float) -> dict[str, float]:
        """Return what a distribution's stats file says of the ids of a sample, by the names of
        `Feature`, for a mean of ``mean``."""
        file = raw["files"][self.window] if "files" in raw else raw["file"]
        arrays = self._files.get(file) or {}
        lengths = _lengths(arrays, str(raw.get("feature") or feature))
        there = lengths.pop("pooling_factor", None)
        if not there:
            return {}
        return {k: v if k == CORRELATION else v * mean / there for k, v in lengths.items()}

    def _measured(
        self, file: str, feature: str, path: KeyPath, key: str = "file"
    ) -> Distribution | None:
        arrays = self._load(file, (*path, key))
        if arrays is None:
            return None
        names = sorted(key.removesuffix(".counts") for key in arrays if key.endswith(".counts"))
        if feature not in names:
            self.problems.add(
                (*path, "feature"),
                f"{file} has no feature {shown(feature)}{did_you_mean(feature, names)}; "
                f"it has: {', '.join(names[:20]) or 'none'}",
            )
            return None
        try:
            return measured_distribution(arrays, feature)
        except (InputError, KeyError, ValueError) as error:
            self.problems.add((*path, "feature"), f"{file}, {feature}: {error}")
            return None

    def _load(self, file: str, path: KeyPath) -> dict[str, NDArray[np.float64]] | None:
        if file not in self._files:
            self._files[file] = None
            try:
                refuse_streams(self.directory / file, "stats file")
                arrays = load_arrays(self.directory / file, MOST_BYTES)
                self._files[file] = {
                    name: np.asarray(array, dtype=np.float64) for name, array in arrays.items()
                }
            except InputError as error:
                self.problems.add(path, str(error))
            except FileNotFoundError:
                self.problems.add(path, f"there is no file {self.directory / file}")
            except (OSError, TypeError, *BROKEN) as error:
                self.problems.add(path, f"{file} is not an .npz file of number arrays: {error}")
        return self._files[file]


def read_stats(path: Path) -> dict[str, Feature]:
    """The features of a stats file, with their distributions and pooling factors.

    Raises:
        InputError: it cannot be read.
    """
    problems = Problems(str(path))
    reader = DistributionReader(Path(), problems)
    arrays = reader._load(str(path), ()) or {}
    names = [key.removesuffix(".counts") for key in arrays if key.endswith(".counts")]
    features = {}
    for name in names:
        distribution = reader.read({"file": str(path), "feature": name}, (), name)
        lengths = _lengths(arrays, name)
        if "pooling_factor" not in lengths:
            lengths = {"pooling_factor": 1.0}
        features[name] = Feature(name, distribution=distribution, **lengths)  # type: ignore[arg-type]
    problems.raise_if_any()
    return features


def _lengths(arrays: Mapping[str, NDArray[np.float64]], feature: str) -> dict[str, float]:
    """Return what a file says of the ids of a sample, by the names of `Feature`; values that are
    missing or out of range are left out."""
    lengths = {}
    for name, (low, high) in LENGTHS.items():
        array = arrays.get(f"{feature}.{name}")
        value = float(array.reshape(-1)[0]) if array is not None and array.size == 1 else math.nan
        if low <= value <= high:
            lengths[name] = value
    return lengths


def measured_distribution(
    arrays: Mapping[str, NDArray[np.float64]], feature: str
) -> Empirical | EmpiricalByRange:
    """Bins, and where their rows lie if the file says so, as `shardopt stats` writes them."""
    counts = arrays[f"{feature}.counts"]
    weights = arrays.get(f"{feature}.weights")
    if weights is None:
        raise InputError(f"the array {feature}.weights is missing")
    if counts.ndim != 1 or weights.ndim != 1:
        raise InputError("the arrays must have one dimension")
    if not (np.isfinite(counts).all() and np.isfinite(weights).all()):
        raise InputError("the arrays hold values that are not finite")
    whole = Empirical(tuple(counts.tolist()), tuple(weights.tolist()))
    rows = arrays.get(f"{feature}.range_rows")
    if rows is None:
        return whole
    if rows.ndim != 2 or not np.isfinite(rows).all():
        raise InputError(f"{feature}.range_rows must be finite numbers, bins by id ranges")
    width, table = (_whole(arrays, f"{feature}.{name}") for name in ("range_width", "rows"))
    return EmpiricalByRange(whole, rows, width, table)


def _whole(arrays: Mapping[str, NDArray[np.float64]], name: str) -> int:
    value = arrays.get(name)
    if value is None or value.size != 1 or not float(value.reshape(-1)[0]).is_integer():
        raise InputError(f"the array {name} must be there and hold one whole number")
    return int(value.reshape(-1)[0])


def window_names(files: Sequence[str | Path]) -> list[str]:
    """Names of windows: those of their files, without folders where these differ."""
    stems = [Path(file).stem for file in files]
    return stems if len({*stems}) == len(stems) else [str(file) for file in files]


def workloads_of_stats(workload: Workload, files: Sequence[Path]) -> dict[str, Workload]:
    """The workload with the pooling factors and index distributions of each stats file.

    Args:
        files: as `shardopt stats` writes them, at least one; all have the same features.

    Raises:
        InputError: one cannot be read, has no feature of the model, or
            has other features or another table than the others.
    """
    if len(files) > MAX_WINDOWS:
        raise InputError(
            f"got {len(files)} stats files; at most {MAX_WINDOWS} windows are read",
            inputs=("stats",),
        )
    names = window_names(files)
    if len({*names}) < len(names):
        raise InputError(f"{', '.join(names)}: a window is given twice", inputs=("stats",))
    measured = [read_stats(file) for file in files]
    in_model = {f.name for table in workload.tables for f in table.features}
    first = in_model & {*measured[0]}
    for file, of_window in zip(files, measured, strict=True):
        mine = in_model & {*of_window}
        if not mine:
            raise InputError(
                f"{file} has none of the model's features ({', '.join(sorted(in_model)[:10])}); "
                "give the statistics of this model's data",
                inputs=("stats",),
            )
        if mine != first:
            name = min(mine ^ first)
            holder, other = (file, files[0]) if name in mine else (files[0], file)
            raise InputError(
                f"{other} has no feature '{name}', which {holder} has"
                f"{did_you_mean(name, sorted(mine & first))}; windows must have the same features",
                inputs=("stats",),
            )
    windows = {
        name: _with_stats(workload, of_window)
        for name, of_window in zip(names, measured, strict=True)
    }
    check_windows(windows)
    return windows


def _with_stats(workload: Workload, measured: Mapping[str, Feature]) -> Workload:
    fields = (*LENGTHS, "distribution")

    def known(feature: Feature) -> Feature:
        by = measured.get(feature.name, feature)
        return replace(feature, **{field: getattr(by, field) for field in fields})

    tables = (replace(t, features=tuple(map(known, t.features))) for t in workload.tables)
    return replace(workload, tables=tuple(tables))


def move_pooling(workload: Workload, base: Workload, first: Workload, window: Workload) -> Workload:
    """A workload with the pooling factors of ``base``, moved as much as from one window to another.

    Args:
        workload, base: of the same tables.
        first, window: with the features by which they move; others stay.
    """
    before, now = (
        {f.name: f.pooling_factor for table in workload_then.tables for f in table.features}
        for workload_then in (first, window)
    )

    def moved(feature: Feature, own: Feature) -> Feature:
        by = now[feature.name] / before[feature.name] if feature.name in before else 1.0
        return replace(feature, pooling_factor=own.pooling_factor * by)

    tables = (
        replace(table, features=tuple(map(moved, table.features, own.features)))
        for table, own in zip(workload.tables, base.tables, strict=True)
    )
    return replace(workload, tables=tuple(tables))


def check_windows(windows: Mapping[str, Workload]) -> None:
    """Refuse windows of larger tables than the model has.

    Raises:
        InputError: names window, feature and table.
    """
    for name, workload in windows.items():
        for table in workload.tables:
            for feature in table.features:
                distribution = feature.distribution
                rows = distribution.table_rows if isinstance(distribution, EmpiricalByRange) else 0
                if rows > table.num_embeddings:
                    raise InputError(
                        f"window {name}: feature '{feature.name}' was measured on a table of "
                        f"{rows:,} rows, but '{table.name}' has {table.num_embeddings:,}; windows "
                        "must be of the model's own tables",
                        inputs=("stats",),
                    )
