"""2D sparse parallelism on CPU ranks, to try a script where there is no GPU."""

from __future__ import annotations

from typing import Any

from shardopt.extras import needs_torchrec
from shardopt.torchrec.private import copies_of

with needs_torchrec():
    import torch
    import torch.distributed as dist
    from torch.distributed.remote_device import _remote_device
    from torchrec.distributed.model_parallel import DMPCollection
    from torchrec.distributed.types import ShardingPlan


class CpuCollection(DMPCollection):
    """`DMPCollection` for gloo ranks.

    Its constructor asserts that there is a GPU: start Python with ``PYTHONOPTIMIZE=1``. It numbers
    devices of shards, which CPUs do not have, and takes a mean, which gloo does not have.

    Args:
        given: as `DMPCollection` takes it.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        named.setdefault("custom_all_reduce", self.average)
        super().__init__(*arguments, **named)

    def average(self, tensors: list[torch.Tensor]) -> None:
        """The mean over the copies, in place."""
        group = copies_of(self)
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
            tensor /= dist.get_world_size(group)

    def _remap_sharding_plan(self, plan: ShardingPlan, *arguments: Any, **named: Any) -> None:
        super()._remap_sharding_plan(plan, *arguments, **named)
        for module in plan.plan.values():
            for sharding in module.values():
                for shard in getattr(sharding.sharding_spec, "shards", None) or ():
                    shard.placement = _remote_device(f"rank:{shard.placement.rank()}/cpu")
