"""Index distributions of model.yaml, among them those measured into an .npz file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from predictor.errors import InputError, did_you_mean
from predictor.model.distribution import (
    Distribution,
    Empirical,
    EmpiricalByRange,
    ReuseHistogram,
    Uniform,
    Zipf,
)
from shardopt.config.problems import KeyPath, Problems, shown
from shardopt.config.schema import HistogramSection, StatsSection, ZipfSection, check
from shardopt.files import refuse_streams
from shardopt.npz import BROKEN, load_arrays

KINDS = "uniform, {zipf: {alpha: 1.05}}, {reuse_histogram: {lookups, fractions}}, {file, feature}"


MOST_BYTES = 2**26
"""Of a stats file; those of forty features have a few hundred kilobytes."""


@dataclass
class DistributionReader:
    """Reads index distributions; every stats file is opened once.

    Args:
        directory: what file names are relative to.
        problems: where errors go.
        left_out: features without a distribution so far, which count as uniform.
        total: features so far.
    """

    directory: Path
    problems: Problems
    left_out: int = 0
    total: int = 0
    _files: dict[str, dict[str, NDArray[np.float64]] | None] = field(default_factory=dict)

    def read(self, raw: object, path: KeyPath, feature: str) -> Distribution:
        """The distribution written at ``path``; uniform when it has a problem.

        Args:
            raw: ``uniform``, or a mapping of one kind: ``zipf``, ``reuse_histogram``, or ``file``
                and ``feature`` (which is the feature's own name when left out).
            path: where it stands.
            feature: name of the feature it describes.
        """
        self.total += 1
        if raw is None:
            self.left_out += 1
            return Uniform()
        if raw == "uniform":
            return Uniform()
        if isinstance(raw, dict):
            return self._mapping(raw, path, feature) or Uniform()
        hint = did_you_mean(raw, ["uniform", "zipf"]) if isinstance(raw, str) else ""
        self.problems.add(path, f"got {shown(raw)}; allowed: {KINDS}{hint}")
        return Uniform()

    def _mapping(self, raw: dict[str, Any], path: KeyPath, feature: str) -> Distribution | None:
        if "file" in raw:
            stats = check(StatsSection, raw, path, self.problems)
            return self._measured(stats.file, stats.feature or feature, path) if stats else None
        if list(raw) == ["zipf"]:
            zipf = check(ZipfSection, raw["zipf"], (*path, "zipf"), self.problems)
            return Zipf(zipf.alpha, zipf.q) if zipf else None
        if list(raw) == ["reuse_histogram"]:
            return self._histogram(raw["reuse_histogram"], (*path, "reuse_histogram"))
        known = ["zipf", "reuse_histogram", "file"]
        hints = [did_you_mean(key, known) for key in raw if key not in known]
        self.problems.add(path, f"got {shown(raw)}; allowed is one of {KINDS}{''.join(hints[:1])}")
        return None

    def _histogram(self, raw: object, path: KeyPath) -> Distribution | None:
        section = check(HistogramSection, raw, path, self.problems)
        if section is None:
            return None
        if sum(section.fractions) <= 0:
            self.problems.add((*path, "fractions"), "all are 0; give at least one above 0")
            return None
        return ReuseHistogram(section.lookups, tuple(section.fractions))

    def _measured(self, file: str, feature: str, path: KeyPath) -> Distribution | None:
        arrays = self._load(file, (*path, "file"))
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
            return _measured(arrays, feature)
        except (InputError, KeyError, ValueError) as error:
            self.problems.add((*path, "feature"), f"{file}, {feature}: {error}")
            return None

    def _load(self, file: str, path: KeyPath) -> dict[str, NDArray[np.float64]] | None:
        if file not in self._files:
            self._files[file] = None
            try:
                refuse_streams(self.directory / file, "stats file")
                self._files[file] = _read_npz(self.directory / file)
            except InputError as error:
                self.problems.add(path, str(error))
            except FileNotFoundError:
                self.problems.add(path, f"there is no file {self.directory / file}")
            except (OSError, TypeError, *BROKEN) as error:
                self.problems.add(
                    path,
                    f"{file} is not an .npz file of number arrays: {error}",
                )
        return self._files[file]


def _read_npz(path: Path) -> dict[str, NDArray[np.float64]]:
    arrays = load_arrays(path, MOST_BYTES)
    return {name: np.asarray(array, dtype=np.float64) for name, array in arrays.items()}


def _measured(arrays: dict[str, NDArray[np.float64]], feature: str) -> Empirical | EmpiricalByRange:
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


def _whole(arrays: dict[str, NDArray[np.float64]], name: str) -> int:
    value = arrays.get(name)
    if value is None or value.size != 1 or not float(value.reshape(-1)[0]).is_integer():
        raise InputError(f"the array {name} must be there and hold one whole number")
    return int(value.reshape(-1)[0])
