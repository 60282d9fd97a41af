"""One rank that trains a deduplicated EmbeddingCollection: `dedup_worker JOB`, with the model in
`JOB/model.yaml` and the plan in `JOB/plan.json`.

FBGEMM has the op that finds distinct ids for GPUs only; here it is written with torch.
`JOB/ids.RANK.json` lists the ids that the rank's lookups were given, batch by batch.
"""

import json
import logging
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from predictor.model.plan_json import load_plan
from shardopt.config import load_model
from shardopt.training.batch import batch_ring
from shardopt.training.loop import Training
from tests.distributed.ranks import join_group, leave_group

STEPS = 12


def unique_by_feature(
    hash_size_cumsum: torch.Tensor,
    hash_size_offsets: torch.Tensor,
    offsets: torch.Tensor,
    values: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """`fbgemm::jagged_unique_indices` of one feature a table: lengths, offsets, ids, inverse."""
    features = len(hash_size_offsets) - 1
    batch = (len(offsets) - 1) // features
    bounds = offsets[::batch].tolist()
    ids, inverse, lengths, before = [], [], [], 0
    for first, last in pairwise(bounds):
        found, back = torch.unique(values[first:last], return_inverse=True)
        ids.append(found)
        inverse.append(back + before)
        before += len(found)
        of_samples = torch.zeros(batch, dtype=torch.int64)
        of_samples[: len(found) % batch] = 1
        lengths.append(of_samples + len(found) // batch)
    all_lengths = torch.cat(lengths)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), all_lengths.cumsum(0)])
    return all_lengths, ends, torch.cat(ids), torch.cat(inverse)


def main(job: Path) -> None:
    logging.disable(logging.WARNING)
    rank = join_group(job)
    library = torch.library.Library("fbgemm", "IMPL")
    library.impl("jagged_unique_indices", unique_by_feature, "CPU")
    workload = load_model(job / "model.yaml")
    ring = batch_ring(workload, rank=rank, size=STEPS)
    training = Training(workload, load_plan(job / "plan.json"), torch.device("cpu"), ring)
    counts: list[int] = []

    def count(_: Any, given: tuple[Any, ...]) -> None:
        counts.append(int(given[0].values().numel()))

    for lookup in training.model.sparse["ec"]._lookups:
        lookup.register_forward_pre_hook(count)
    for _ in range(STEPS):
        training.step()
    (job / f"ids.{rank}.json").write_text(json.dumps(counts))
    leave_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
