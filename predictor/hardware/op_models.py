"""Kernel models of single CPU ops that are stored with a hardware profile.

Fitted by ``python -m lab fit-op-models`` on replays of calibration models, and used to predict
generated benchmarks. `predictor.cost.ops.cpu_ops.OpModels` evaluates them.
"""

from __future__ import annotations

from importlib import resources
from typing import Literal

from pydantic import Field, ValidationError

from predictor.errors import ProfileError
from predictor.hardware.groups import Group, NonNegative, Positive
from predictor.hardware.problems import complaints, read_document

Coefficients = dict[str, tuple[NonNegative, ...]]


class CpuOps(Group):
    """Kernel models of CPU ops.

    Args:
        near_cache_mib, far_cache_mib: sizes of the caches (`predictor.cost.ops.cpu_ops.Caches`).
        op_ms: what an iteration takes beyond its ops, per call.
        stretch: what an iteration takes for each ms that its ops take alone.
        one_rank: group of ops -> coefficients in ms, in the order of `work` in
            `predictor.cost.ops.cpu_ops`.
        several_ranks: the same, of groups that cost something else where several ranks share a
            memory.
    """

    schema_version: Literal[1] = Field(alias="schema")
    name: str = Field(min_length=1)
    near_cache_mib: Positive
    far_cache_mib: Positive
    op_ms: NonNegative
    stretch: NonNegative
    one_rank: Coefficients
    several_ranks: Coefficients

    def coefficients(self, ranks: int) -> Coefficients:
        """Of all groups, on a number of ranks."""
        return self.one_rank if ranks == 1 else {**self.one_rank, **self.several_ranks}


def load_op_models(name: str) -> CpuOps:
    """The kernel models that the package holds for a profile.

    Args:
        name: of a shipped profile, such as ``cpu-gloo``.

    Raises:
        ProfileError: there are none of that name, or the file is broken.
    """
    file = resources.files("predictor.hardware") / "ops" / f"{name}.yaml"
    if not file.is_file():
        raise ProfileError(f"no kernel models of single ops come with the profile '{name}'")
    document = read_document(file.read_text(encoding="utf-8"), f"ops/{name}.yaml")
    try:
        return CpuOps.model_validate(document.data)
    except ValidationError as error:
        raise ProfileError("\n".join(complaints(document, error, None))) from error
