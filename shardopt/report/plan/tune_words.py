"""What to change in the model file and the training script to get a setting that was tuned."""

from __future__ import annotations

from collections.abc import Mapping

from predictor.units import GIB
from search.tune.case import Case, Value

LOOPS = {
    "base": "TrainPipelineBase",
    "sparse_dist": "TrainPipelineSparseDist",
    "prefetch_sparse_dist": "PrefetchTrainPipelineSparseDist",
}
"""TorchRec's classes, in torchrec.distributed.train_pipeline."""


def change_lines(before: Case, after: Case, changes: Mapping[str, Value]) -> list[str]:
    """A line for each change, with what it asks of the model file, the script or the command.

    Args:
        changes: the parameters that differ from the case as given, with their new values.
    """
    lines = []
    if "batch_size" in changes or "hosts" in changes:
        lines.append(_batch(before, after))
    if "pipeline" in changes:
        value = after.workload.train_pipeline
        lines.append(f"train_pipeline: {value} in the model file; {LOOPS[value]} in the script")
    if "qcomm_forward" in changes or "qcomm_backward" in changes:
        lines.append(_qcomm(after))
    if "bucket" in changes:
        size = f"{after.workload.dense.bucket_cap_mb:g}"
        lines.append(
            f"dense: bucket_cap_mb: {size} in the model file; DistributedModelParallel(..., "
            f"data_parallel_wrapper=DefaultDataParallelWrapper(bucket_cap_mb={size}))"
        )
    if "cw_min" in changes:
        lines.append(
            f"constraints: {{min_partition: {changes['cw_min']}}} of the tables without one; "
            f"ParameterConstraints(min_partition={changes['cw_min']})"
        )
    if "cache_ratio" in changes:
        lines.append(
            f"constraints: {{cache_load_factor: {changes['cache_ratio']}}} of the tables without "
            "one; ParameterConstraints(cache_params=CacheParams(load_factor="
            f"{changes['cache_ratio']}))"
        )
    if "hbm" in changes:
        least = min(after.installed.hbm_cap_bytes) / GIB
        lines.append(f"--hbm-gib {least:.6g}: plans that leave the rest of the memory free")
    return [line for line in lines if line]


def _batch(before: Case, after: Case) -> str:
    """Samples of a rank and of all; the number of ranks."""
    ranks, local = after.installed.world_size, after.installed.local_world_size
    size, words = after.workload.batch_size, []
    if size != before.workload.batch_size:
        words.append(f"batch_size: {size} in the model file, and of the data loader of each rank")
    if ranks != before.installed.world_size:
        words.append(f"--gpus {ranks} --gpus-per-node {local}; torchrun --nnodes {ranks // local}")
    total, was = size * ranks, before.workload.batch_size * before.installed.world_size
    if total != was:
        words.append(
            f"{total:,} samples per iteration instead of {was:,}: check that training converges "
            "alike (learning rate)"
        )
    return "; ".join(words)


def _qcomm(after: Case) -> str:
    forward, backward = after.workload.qcomm.forward, after.workload.qcomm.backward
    return (
        f"qcomm: {{forward: {forward}, backward: {backward}}} in the model file; sharders with "
        "qcomm_codecs_registry=get_qcomm_codecs_registry(QCommsConfig("
        f"forward_precision=CommType.{forward.upper()}, "
        f"backward_precision=CommType.{backward.upper()})); check that training converges alike"
    )
