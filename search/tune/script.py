"""Steps in the training script: settings of the process and of lookups outside the model file.

Each changes constants of the profile: host work that goes away, or a kernel that no longer runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from predictor.hardware.schema import CudaEmbedding, HardwareProfile
from search.tune.knobs import Case, Step

UNCHECKED = "an id out of range reads other memory instead of raising an error"


def script_steps(case: Case) -> Iterator[Step]:
    """Yield the settings that a script could change here, one at a time."""
    hw = case.hardware
    overheads, embedding = hw.overheads, hw.embedding
    if (overheads.threads or 1) > 1 and overheads.idle_threads_us:
        yield Step(
            "OMP_NUM_THREADS",
            None,
            1,
            _one_thread,
            (),
            "set OMP_NUM_THREADS=1 before Python starts, as torchrun does",
        )
    if isinstance(embedding, CudaEmbedding) and embedding.bounds_ns:
        yield Step(
            "bounds_check_mode",
            None,
            "none",
            _unchecked,
            (UNCHECKED,),
            'fused_params={"bounds_check_mode": BoundsCheckMode.NONE} of the sharder, once the '
            "data is known to be clean",
        )


def _one_thread(case: Case) -> Case:
    """Remove idle OpenMP threads; the time outside the stages stays at 0 or above."""
    overheads = case.hardware.overheads
    total = overheads.iteration_us + overheads.batch_us
    rest = max(0.0, total - overheads.idle_threads_us)
    share = rest / total if total else 1.0
    return replace(
        case,
        hardware=_with(
            case.hardware,
            threads=1,
            iteration_us=overheads.iteration_us * share,
            batch_us=overheads.batch_us * share,
        ),
    )


def _with(hw: HardwareProfile, **changes: float) -> HardwareProfile:
    return hw.model_copy(update={"overheads": hw.overheads.model_copy(update=changes)})


def _unchecked(case: Case) -> Case:
    embedding = case.hardware.embedding.model_copy(update={"bounds_ns": 0.0})
    return replace(case, hardware=case.hardware.model_copy(update={"embedding": embedding}))
