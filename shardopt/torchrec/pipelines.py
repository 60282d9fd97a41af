"""TorchRec's train pipelines: as which one each is priced, and what that leaves out.

From torchrec/distributed/train_pipeline of TorchRec 1.7 to 1.9.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from predictor.errors import InputError, did_you_mean
from predictor.model.workload import PIPELINES
from shardopt.logs import logger


class Assumed(NamedTuple):
    """Price model of a train pipeline.

    Args:
        pipeline: of `PIPELINES`, whose time and memory are predicted.
        leaves_out: what the pipeline does otherwise; empty where it is priced as it is.
        stashes: ``weights`` of tables with `stash_weights`, or ``optimizer``: the states of the
            dense optimizer; empty where nothing leaves the device.
    """

    pipeline: str
    leaves_out: str = ""
    stashes: str = ""


KNOWN = {
    "TrainPipelineBase": Assumed("base"),
    "TrainPipelineSparseDist": Assumed("sparse_dist"),
    "PrefetchTrainPipelineSparseDist": Assumed("prefetch_sparse_dist"),
    "TrainPipelineSemiSync": Assumed("semi_sync"),
    "TrainPipelineSparseDistEmbStash": Assumed("sparse_dist", stashes="weights"),
    "TrainPipelineSparseDistOptStash": Assumed("sparse_dist", stashes="optimizer"),
    "TrainPipelinePrefetchEMS": Assumed(
        "sparse_dist",
        "caches of UVM tables are written back after the lookups and filled again before their "
        "backward",
        "weights",
    ),
    "TrainPipelinePT2": Assumed("base", "the model is compiled: fewer and larger kernels"),
    "TrainPipelineSparseDistLite": Assumed(
        "base", "the ids of all modules are announced in one exchange, ahead of the forward"
    ),
    "TrainPipelineFusedSparseDist": Assumed(
        "sparse_dist", "lookups of the next batch run beside the optimizer step"
    ),
    "TrainPipelineSparseDistCompAutograd": Assumed("sparse_dist", "the backward is compiled"),
    "TrainPipelineSparseDistT": Assumed(
        "sparse_dist", "a thread of its own issues the copy of the batch"
    ),
    "TrainPipelineSparseDistBwdOpt": Assumed(
        "sparse_dist", "the dense optimizer runs beside the gradients' exchange in the backward"
    ),
    "TrainPipelinePEC": Assumed(
        "sparse_dist", "rows that the batch before does not touch are looked up ahead"
    ),
    "StagedTrainPipeline": Assumed("base", "what its stages run ahead"),
}
"""Price model by class of TorchRec."""


def priced_as(pipeline: Any) -> Assumed:
    """Return the price model of a train pipeline.

    Args:
        pipeline: one of `PIPELINES`, a class of TorchRec or its name, a subclass, or a pipeline.

    Raises:
        InputError: nothing is known of it.
    """
    if pipeline in PIPELINES:
        return Assumed(pipeline)
    kind = pipeline if isinstance(pipeline, type | str) else type(pipeline)
    names = [kind] if isinstance(kind, str) else [base.__name__ for base in kind.__mro__]
    for name in names:
        if name in KNOWN:
            assumed = KNOWN[name]
            own = f"what {names[0]} changes of {name}" if name != names[0] else ""
            left_out = "; ".join(part for part in (assumed.leaves_out, own) if part)
            return assumed._replace(leaves_out=left_out)
    allowed = [*PIPELINES, *KNOWN]
    raise InputError(
        f"train_pipeline is {names[0]!r}{did_you_mean(names[0], allowed)}; allowed are "
        f"{', '.join(PIPELINES)}, or a train pipeline of TorchRec: {', '.join(KNOWN)}, or a "
        "subclass"
    )


def tell(pipeline: Any) -> Assumed:
    """Return the price model of a train pipeline, and log what it leaves out.

    Raises:
        InputError: as `priced_as`.
    """
    assumed = priced_as(pipeline)
    if assumed.leaves_out:
        kind = type(pipeline).__name__
        name = pipeline if isinstance(pipeline, str) else getattr(pipeline, "__name__", kind)
        logger.warning(
            "train_pipeline %s is predicted as %s: %s", name, assumed.pipeline, assumed.leaves_out
        )
    return assumed
