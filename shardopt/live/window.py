"""What a training loop says of its data while it runs: ids of some samples, and all step times.

Samples are counted only while the time spent in here is below `SHARE` of the time that has passed,
over all windows, so that the overhead is bounded whatever counting costs; and few at a time, so
that no step waits long. The counts are those of `shardopt stats`.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shardopt.extras import needs_torchrec
from shardopt.files import atomic_open
from shardopt.stats.collect import ReadOptions
from shardopt.stats.counts import Bags, FeatureCounts
from shardopt.stats.result import FeatureStats, summarise

with needs_torchrec():
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

SHARE = 0.003
"""Of the time of a training loop, that counting may take."""
LONGEST_STEP = 3.0
"""Of the step before: what takes longer, as an evaluation does, is no time to count in."""
MOST_IDS = 2**18
"""Distinct ids of a feature that are counted exactly in a window."""
MOST_AT_ONCE = 2**16
"""Ids of all features together that are counted in one step: some milliseconds."""


class StepWindow:
    """Steps of one rank since it was made.

    Args:
        counts_ids: count those of some samples, and not only steps.
        credit_s: time that may be spent on counting at once; negative if too much was spent before.
    """

    def __init__(self, *, counts_ids: bool = True, credit_s: float = 0.0) -> None:
        self.counts: dict[str, FeatureCounts] = {}
        self.credit_s = credit_s
        self._counts_ids = counts_ids
        self._counted = 0
        self._times = array("d")
        self._last = time.perf_counter()

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return len(self._times)

    @property
    def step_ms(self) -> float:
        """Median time of a step; nan where there was none."""
        return 1e3 * float(np.median(self._times)) if self._times else float("nan")

    def add(self, features: Any) -> None:
        """One step. The first of a window is counted whatever there is to spend.

        Args:
            features: its ids: a KeyedJaggedTensor, or several in a mapping.
        """
        now = time.perf_counter()
        took = now - self._last
        usual = min(took, LONGEST_STEP * self._times[-1]) if self._times else 0.0
        self._times.append(took)
        self.credit_s += SHARE * usual
        if self._counts_ids and (self.credit_s >= 0 or not self.counts):
            for name, bags in _bags_of(features, self._counted):
                self.counts.setdefault(name, FeatureCounts(MOST_IDS)).add(bags)
            self._counted += 1
        self._last = time.perf_counter()
        self.credit_s -= self._last - now

    def save(self, path: Path) -> None:
        """Write the counts, as a checkpoint of `shardopt stats` has them, and the step times."""
        start = time.perf_counter()
        arrays: dict[str, Any] = {"step_seconds": np.array(self._times)}
        for name, found in self.counts.items():
            arrays |= {f"{name}.{what}": value for what, value in found.state().items()}
        with atomic_open(path) as stream:
            np.savez(stream, allow_pickle=False, **arrays)
        self.credit_s -= time.perf_counter() - start

    def statistics(self, rows: Mapping[str, int]) -> list[FeatureStats]:
        """What the counted ids say, by feature.

        Args:
            rows: of the features' tables.
        """
        known = {name: found for name, found in self.counts.items() if name in rows}
        return list(summarise(known, ReadOptions(rows=rows), 0))


def _bags_of(features: Any, turn: int) -> Iterator[tuple[str, Bags]]:
    """Bags of every feature, of some samples in a row; of one that several tensors hold, the first.

    Args:
        turn: each takes the samples after those of the one before, as where a sample lies in its
            batch may say what it is, and a data set that is read again must not be counted twice.
    """
    tensors = list(features.values()) if isinstance(features, Mapping) else [features]
    for tensor in tensors:
        if not isinstance(tensor, KeyedJaggedTensor):
            raise TypeError(
                f"got {type(tensor).__name__} as the ids of a step; give the batch's "
                "KeyedJaggedTensor, or a mapping of several"
            )
    share = min(1.0, MOST_AT_ONCE / max(1, sum(tensor.values().numel() for tensor in tensors)))
    seen: set[str] = set()
    for tensor in tensors:
        lengths = tensor.lengths().cpu().numpy()
        id_, sample = 0, 0
        for key, ids, samples in zip(
            tensor.keys(), tensor.length_per_key(), tensor.stride_per_key(), strict=True
        ):
            if key not in seen:
                seen.add(key)
                count = math.ceil(share * samples)
                skip = turn * count % max(1, samples - count + 1)
                mine = lengths[sample + skip : sample + skip + count].astype(np.int64)
                first = id_ + int(lengths[sample : sample + skip].sum())
                part = tensor.values()[first : first + int(mine.sum())]
                yield key, Bags(part.cpu().numpy().astype(np.int64), mine)
            id_, sample = id_ + ids, sample + samples
