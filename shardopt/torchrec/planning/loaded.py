"""Plans that a `PlanLoader` brings, those with options that no enumerator lists among them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from shardopt.extras import needs_torchrec

with needs_torchrec():
    from torchrec.distributed.planner.types import Enumerator, PlanLoader, ShardingOption


class LoadedOptions:
    """A user's `PlanLoader`, for `EmbeddingShardingPlanner.plan`.

    TorchRec finds a loaded option in the search space by a hash of its kind, its number of shards
    and the load factor of its cache (`extract_plan` in planner/planners.py), and takes only its
    shards. Column cuts and load factors that the search added are not in that space, so they go
    under the hash of the enumerator's option of the same kind; `restored` brings the load factor
    back.

    Args:
        loader: the user's.
        enumerator: whose last search space the options belong to.
    """

    def __init__(self, loader: PlanLoader, enumerator: Enumerator) -> None:
        self._loader = loader
        self._enumerator = enumerator
        self._moved: dict[str, ShardingOption] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def load(self) -> dict[int, ShardingOption] | None:
        """The loaded options, each under a hash of the search space where it has one."""
        self._moved = {}
        loaded = self._loader.load()
        if loaded is None:
            return None
        space = getattr(self._enumerator, "last_stored_search_space", None) or []
        listed = {option.storage_hash() for option in space}
        found = {}
        for key, option in loaded.items():
            twin = None if key in listed else _same_kind(option, space)
            if twin is not None:
                self._moved[option.fqn] = option
            found[key if twin is None else twin.storage_hash()] = option
        return found

    def restored(self, options: list[ShardingOption]) -> list[ShardingOption]:
        """The plan that was made of the loaded options, with the load factors they had."""
        return [self._restored(option) for option in options]

    def _restored(self, option: ShardingOption) -> ShardingOption:
        before = self._moved.get(option.fqn)
        if before is None:
            return option
        made = copy.copy(option)
        made.cache_params = before.cache_params
        return made


def _same_kind(option: ShardingOption, space: Sequence[ShardingOption]) -> ShardingOption | None:
    kind = option.fqn, option.sharding_type, option.compute_kernel
    same = (o for o in space if (o.fqn, o.sharding_type, o.compute_kernel) == kind)
    return next(same, None)
