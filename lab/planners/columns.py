"""Whole tables and halves of their columns, in device memory: what most papers choose from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from predictor.model.plan import ComputeKernel, ShardingType
from search.baselines.greedy import Array, Ints, Shards
from search.space.option import Option

ON_DEVICE = (ComputeKernel.FUSED, ComputeKernel.DENSE)


def list_halvings(options: Sequence[Option]) -> list[Option]:
    """The table whole, then in 2, 4, 8, ... column shards, as far as the space has them.

    A table that may not lie whole on a rank begins with its coarsest split; empty if its
    constraints leave neither.
    """
    found: dict[int, Option] = {}
    for option in options:
        whole = option.sharding_type is ShardingType.TABLE_WISE
        split = option.sharding_type is ShardingType.COLUMN_WISE
        power_of_two = option.num_shards & (option.num_shards - 1) == 0
        if option.compute_kernel in ON_DEVICE and (whole or split) and power_of_two:
            found.setdefault(option.num_shards, option)
    return [found[count] for count in sorted(found)]


def option_of_type(options: Sequence[Option], sharding_type: ShardingType) -> Option | None:
    """The table's option of this type on the device, if it has one."""
    fitting = (
        o for o in options if o.sharding_type is sharding_type and o.compute_kernel in ON_DEVICE
    )
    return next(fitting, None)


def shards_of(chosen: Sequence[Option], costs: Sequence[Array]) -> tuple[Shards, Ints]:
    """All shards of the chosen options, and which of ``chosen`` each belongs to.

    Args:
        costs: of every shard of every option.
    """
    owner = np.repeat(np.arange(len(chosen)), [o.num_shards for o in chosen])
    memory = np.array(
        [(m.hbm_bytes, m.ddr_bytes) for o in chosen for m in o.memory], dtype=np.float64
    ).reshape(-1, 2)
    dims = np.array([size[1] for o in chosen for size in o.sizes], dtype=np.float64)
    return Shards(np.concatenate([np.zeros(0), *costs]), memory, dims), owner


def ranks_of(owner: Ints, ranks: Ints, chosen: Sequence[Option]) -> list[tuple[int, ...]]:
    """Ranks of the shards of each chosen option."""
    return [tuple(ranks[owner == index].tolist()) for index in range(len(chosen))]
