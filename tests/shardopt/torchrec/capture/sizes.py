"""The numbers that a captured program depends on."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class AtBatch:
    """A batch, and the ids of features by module and name."""

    batch_size: int
    ids_per_sample: dict[tuple[str, str], float] = field(default_factory=dict)
