"""Files that torch.save wrote, chunk by chunk. torch loads each file whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from shardopt.stats.counts import Bags
from shardopt.stats.source import Chunk, pick, whole_numbers


class TensorSource:
    """KeyedJaggedTensors, or indices, offsets and lengths of many tables.

    A chunk lies within one batch, so it may have fewer rows than asked for.
    """

    times: Sequence[str] = ()

    def __init__(self, path: Path) -> None:
        from shardopt.torchrec.training.saved_batches import load_batches

        self.path = path
        self.batches = load_batches(path)
        self.features: Sequence[str] = self.batches[0].names if self.batches else []

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
