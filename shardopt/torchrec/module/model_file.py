"""A model file written from a real module, to plan where the module is not available."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

from predictor.model.workload import Workload
from shardopt.config.write import with_digest, write_model
from shardopt.extras import needs_torchrec
from shardopt.torchrec.logs import silence_torchrec
from shardopt.torchrec.module.read_module import read_workload
from shardopt.torchrec.module.read_table import UserInputs

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

    Index distributions are written as uniform; `shardopt stats` or the user knows better ones.

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
    given = dict(constraints or {})
    chosen = list(get_default_sharders() if sharders is None else sharders)
    with silence_torchrec():
        one_gpu = TorchRecTopology(world_size=1, compute_device="cuda")
        # the file is for any device: one that a constraint asks for is checked when it is planned
        any_device = {name: replace(item, device_group=None) for name, item in given.items()}
        options = EmbeddingEnumerator(one_gpu, batch_size, any_device).enumerate(module, chosen)
    workload = read_workload(module, chosen, options, UserInputs(batch_size, given, None))
    # with the user's constraints alone, not with all that a sharder offers
    tables = tuple(
        replace(table, constraints=replace(table.constraints, offered=None))
        for table in workload.tables
    )
    written = replace(workload, tables=tables)
    write_model(Path(path), written)
    return with_digest(written)
