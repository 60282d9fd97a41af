"""What a training loop says of its data while it runs: ids of some batches, and all step times.

A batch is counted only while the time spent on counting is below `SHARE` of the time that has
passed, so that the overhead is bounded whatever the batches cost. The counts are those of
`shardopt stats`.
"""

from __future__ import annotations

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
MOST_IDS = 2**18
"""Distinct ids of a feature that are counted exactly in a window."""


class StepWindow:
    """Steps of one rank since it was made.

    Args:
        counts_ids: count those of some batches, and not only steps.
    """

    def __init__(self, *, counts_ids: bool = True) -> None:
        self.counts: dict[str, FeatureCounts] = {}
        self.batches = 0
        self.counting_s = 0.0
        self._counts_ids = counts_ids
        self._times = array("d")
        self._began = self._last = time.perf_counter()

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return len(self._times)

    @property
    def step_ms(self) -> float:
        """Median time of a step; nan where there was none."""
        return 1e3 * float(np.median(self._times)) if self._times else float("nan")

    @property
    def overhead(self) -> float:
        """Share of the time that was spent in here."""
        return self.counting_s / max(1e-9, self._last - self._began)

    def add(self, features: Any) -> None:
        """One step.

        Args:
            features: its ids: a KeyedJaggedTensor, or several in a mapping.
        """
        now = time.perf_counter()
        self._times.append(now - self._last)
        due = self.counting_s <= SHARE * (now - self._began) or not self.batches
        if self._counts_ids and due:
            self._count(features)
        self._last = time.perf_counter()
        self.counting_s += self._last - now

    def _count(self, features: Any) -> None:
        self.batches += 1
        for name, bags in _bags_of(features):
            self.counts.setdefault(name, FeatureCounts(MOST_IDS)).add(bags)

    def save(self, path: Path) -> None:
        """Write the counts, as a checkpoint of `shardopt stats` has them, and the step times."""
        arrays: dict[str, Any] = {"step_seconds": np.array(self._times)}
        for name, found in self.counts.items():
            arrays |= {f"{name}.{what}": value for what, value in found.state().items()}
        with atomic_open(path) as stream:
            np.savez(stream, allow_pickle=False, **arrays)

    def statistics(self, rows: Mapping[str, int]) -> list[FeatureStats]:
        """What the counted ids say, by feature.

        Args:
            rows: of the features' tables.
        """
        known = {name: found for name, found in self.counts.items() if name in rows}
        return list(summarise(known, ReadOptions(rows=rows), 0))


def _bags_of(features: Any) -> Iterator[tuple[str, Bags]]:
    """The bags of every feature; of one that several tensors hold, the first."""
    tensors = features.values() if isinstance(features, Mapping) else [features]
    seen: set[str] = set()
    for tensor in tensors:
        if not isinstance(tensor, KeyedJaggedTensor):
            raise TypeError(
                f"got {type(tensor).__name__} as the ids of a step; give the batch's "
                "KeyedJaggedTensor, or a mapping of several"
            )
        ids, lengths = tensor.values().cpu().numpy(), tensor.lengths().cpu().numpy()
        ends = np.cumsum(tensor.length_per_key())
        samples = np.cumsum(tensor.stride_per_key())
        for key, end, last, count, stride in zip(
            tensor.keys(),
            ends,
            samples,
            tensor.length_per_key(),
            tensor.stride_per_key(),
            strict=True,
        ):
            if key not in seen:
                seen.add(key)
                mine = ids[end - count : end].astype(np.int64)
                yield key, Bags(mine, lengths[last - stride : last].astype(np.int64))
