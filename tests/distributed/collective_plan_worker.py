"""One rank that plans with others when something is wrong: `collective_plan_worker JOB`.

First the planning rank fails, then rank 1 stays away. What each rank met goes to
`JOB/met.RANK.json`.
"""

import json
import logging
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchrec
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import ParameterConstraints

from shardopt.torchrec import ShardoptPlanner
from shardopt.torchrec.collective import search_seconds
from tests.distributed.ranks import join_group, leave_group

EFFORT = 0.05


def planner(**of: Any) -> ShardoptPlanner:
    told = {"t": ParameterConstraints(**of)}
    return ShardoptPlanner(batch_size=4, constraints=told, effort=EFFORT, debug=False)


def met(what: Any) -> str:
    """Kind and words of the error that a call ends in."""
    try:
        what()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main(job: Path) -> None:
    """One scenario after the other."""
    logging.disable(logging.CRITICAL)
    config = torchrec.EmbeddingBagConfig(
        name="t", num_embeddings=100, embedding_dim=8, feature_names=["f"]
    )
    model = torchrec.EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
    by = [EmbeddingBagCollectionSharder()]
    found = {"no group": met(lambda: planner(pooling_factors=[2.0]).collective_plan(model, by))}
    rank = join_group(job)
    strict = ShardoptPlanner(batch_size=4, effort=EFFORT, debug=False, strict=True)
    found["failed"] = met(lambda: strict.collective_plan(model, by))
    alone = dist.new_group(backend="gloo", timeout=timedelta(seconds=2))
    found["seconds"] = str([search_seconds(given, alone) for given in (None, 0.1, 60.0)])
    if rank == 0:
        wanted = planner(pooling_factors=[2.0])
        found["missing"] = met(lambda: wanted.collective_plan(model, by, alone))
    dist.barrier()
    (job / f"met.{rank}.json").write_text(json.dumps(found))
    leave_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
