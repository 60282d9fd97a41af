"""A model file from a real module, for planning where the module is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

from predictor.model.plan import ShardingType
from predictor.model.workload import Table, Workload
from shardopt.config.write import with_digest, write_model
from shardopt.extras import needs_torchrec
from shardopt.torchrec.module.read_module import read_workload
from shardopt.torchrec.module.read_table import Facts
from shardopt.torchrec.planning.planner import quiet

with needs_torchrec():
    from torch import nn
    from torchrec.distributed.planner import Topology as TorchRecTopology
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.sharding_plan import get_default_sharders
    from torchrec.distributed.types import ModuleSharder


def to_yaml(
    module: nn.Module,
    path: str | PathLike[str],
    *,
    batch_size: int,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    sharders: Sequence[ModuleSharder[nn.Module]] | None = None,
) -> Workload:
    """Write the model file of a module, or replace it.

    What the file says of index distributions is uniform; `shardopt stats` or the user knows better.

    Args:
        module: unsharded, on any device, ``meta`` too.
        batch_size: samples per rank.
        constraints: TorchRec's, by table name; they carry the pooling factors.
        sharders: TorchRec's default ones unless given.

    Returns:
        The workload as a reader of the file finds it.

    Raises:
        InputError: a fact is missing or the module holds what shardopt does not plan.
    """
    told = dict(constraints or {})
    by = list(get_default_sharders() if sharders is None else sharders)
    with quiet():
        anywhere = TorchRecTopology(world_size=1, compute_device="cuda")
        # the file is for any device: one that a constraint asks for is checked when it is planned
        everyone = {name: replace(given, device_group=None) for name, given in told.items()}
        options = EmbeddingEnumerator(anywhere, batch_size, everyone).enumerate(module, by)
    workload = read_workload(module, by, options, Facts(batch_size, told, None))
    asked = replace(workload, tables=tuple(_as_asked(table, told) for table in workload.tables))
    write_model(Path(path), asked)
    return with_digest(asked)


def _as_asked(table: Table, told: Mapping[str, ParameterConstraints]) -> Table:
    """With the user's constraints alone, not with what a sharder lists anyway."""
    given = told.get(table.name)
    types = None if given is None else given.sharding_types
    kernels = None if given is None else given.compute_kernels
    return replace(
        table,
        constraints=replace(
            table.constraints,
            sharding_types=tuple(map(ShardingType, types)) if types else None,
            compute_kernels=tuple(kernels) if kernels else None,
        ),
    )
