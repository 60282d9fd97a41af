"""Drawn models beside the DLRM: one a seed, every kind in turn, lookups and dense both worth it."""

import pytest

from lab.architecture import KINDS
from lab.tasks.architectures import NOTHING, draw_architecture
from lab.tasks.models import MAX_TABLES_BYTES
from predictor.errors import InputError
from tests.quick import quick_first

SEEDS = quick_first(14, range(28))


def test_seven_seeds_are_the_seven_kinds() -> None:
    drawn = [draw_architecture(seed) for seed in range(7)]
    kinds = [model.architecture.kind for model in drawn if model.architecture]
    assert sorted(kinds) == sorted(KINDS)
    (dlrm,) = [model for model in drawn if model.architecture is None]
    assert dlrm.workload.dlrm.top_mlp != NOTHING.top_mlp


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_gives_one_model_within_bounds(seed: int) -> None:
    made = draw_architecture(seed)
    assert draw_architecture(seed) == made
    workload = made.workload
    assert workload.embedding_bytes <= MAX_TABLES_BYTES
    assert 32 <= workload.batch_size <= 2048
    assert len({t.name for t in workload.tables}) == len(workload.tables)
    features = [f.name for t in workload.tables for f in t.features]
    assert len(set(features)) == len(features)


def test_a_seed_below_zero_is_refused() -> None:
    with pytest.raises(InputError, match="seed is -1"):
        draw_architecture(-1)
