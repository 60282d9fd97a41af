"""Process groups and collectives of a benchmark, on whatever backend there is."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

from .checks import LOST, refuse
from .exchange import CALLS, Batch, EndedCollective, describe, exchange_evenly, from_any, one_to_one
from .matching import FROM_ANY, P2P, CollectiveCall, Plan, plans

TIMEOUT = timedelta(minutes=5)


class Collectives:
    """Runs a rank's collectives.

    In a first iteration nothing is exchanged: the rank only lists its collectives. Then all ranks
    tell each other theirs, once, and each knows which meet (`matching.plans`). Where sizes do not
    fit together, as with traces of a few ranks only, as much is exchanged as the rank with the
    most has, in even parts and in memory of their own; `notes` says so. `not_run` has the
    collectives that meet no other: kind, how many of the kind came before it, and why.
    """

    def __init__(self, groups: Sequence[Sequence[int]], device: torch.device) -> None:
        self.device = device
        self.notes: list[str] = []
        self.bytes: list[int] = []
        self.not_run: list[tuple[str, int, str]] = []
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self.agreed = False
        self._told: list[CollectiveCall] = []
        self._calls: list[Callable[[Sequence[Any]], Any] | None] = []
        self._at = 0
        self._batch = Batch(0)
        self._wanted = [tuple(group) for group in groups]
        self._groups: list[Any] = []

    def start(self) -> None:
        """Open the process groups; collective over all ranks."""
        if not dist.is_initialized():
            self._meet()
        asked: list[Any] = [None] * self.world
        dist.all_gather_object(asked, [self._here(group) for group in self._wanted])
        every = sorted({group for groups in asked for group in groups if group})
        opened = {group: dist.new_group(list(group)) for group in every}
        self._groups = [opened.get(self._here(g)) or dist.group.WORLD for g in self._wanted]

    def _meet(self) -> None:
        # tensors on the host stay there in a job on GPUs too
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        where: dict[str, Any] = {"init_method": "env://"}
        if "BENCHMARK_STORE" in os.environ:
            where = {"init_method": f"file://{os.environ['BENCHMARK_STORE']}"}
        elif "MASTER_ADDR" not in os.environ and self.world == 1:
            where = {"store": dist.HashStore()}
        dist.init_process_group(
            backend, rank=self.rank, world_size=self.world, timeout=TIMEOUT, **where
        )

    def _here(self, group: tuple[int, ...]) -> tuple[int, ...]:
        """The recorded ranks that run here; none stands for all."""
        members = tuple(sorted(rank for rank in group if rank < self.world))
        whole = len(members) == self.world or self.rank not in members
        return () if whole else members

    def begin(self) -> None:
        """A new iteration starts."""
        self._at = 0

    def run(self, kind: str, arguments: Sequence[Any], group: int) -> Any:
        """The next collective of the iteration; something to wait for."""
        if not self.agreed:
            here = self._here(self._wanted[group])
            self._told.append(
                {**describe(kind, arguments, self._wanted[group], here), "opened": group}
            )
            return EndedCollective()
        call = self._calls[self._at]
        self._at += 1
        try:
            return CALLS[kind](arguments, self._groups[group]) if call is None else call(arguments)
        except (RuntimeError, ValueError) as error:
            first = str(error).strip().split("\n")[0]
            where = dist.get_backend(self._groups[group])
            refuse(
                f"c10d::{kind} cannot run on {where}: {first}; --subset compute leaves all "
                "collectives out",
                LOST,
            )

    def agree(self, places: Sequence[int]) -> None:
        """Settle with the other ranks what runs; collective over all ranks.

        Args:
            places: where each listed collective stands among all ops of the iteration.
        """
        every: list[Any] = [None] * self.world
        dist.all_gather_object(every, self._told)
        mine = plans(every)[self.rank]
        batches = _batches(self._told, mine, places)
        counts: dict[str, int] = {}
        for at, (of, plan) in enumerate(zip(self._told, mine, strict=True)):
            kind = of["kind"]
            if "even" in plan:
                self.notes.append(
                    f"{kind}: sizes of the ranks do not fit together; even parts instead"
                )
            if "skip" in plan:
                self.not_run.append((kind, counts.get(kind, 0), plan["skip"]))
            counts[kind] = counts.get(kind, 0) + 1
            self.bytes.append(of["bytes"])
            self._calls.append(self._call(of, plan, batches[at]))
        self.agreed = True

    def _call(
        self, of: CollectiveCall, plan: Plan, batch: int
    ) -> Callable[[Sequence[Any]], Any] | None:
        """None if the collective runs as it was recorded, else what runs in its place."""
        kind, group = of["kind"], self._groups[of["opened"]]
        if "skip" in plan:
            return lambda _: EndedCollective()
        if kind == FROM_ANY:
            return lambda arguments: from_any(arguments, plan, group)
        if kind in P2P:
            return lambda arguments: self._add(one_to_one(kind, arguments, plan, group), batch)
        if "even" not in plan:
            return None
        run = exchange_evenly(kind, plan, group, self.device)
        return lambda _: run()

    def _add(self, op: Any, size: int) -> Batch:
        """To the sends and receives that start together; `size` of the first, else 0."""
        if size:
            self._batch = Batch(size)
        return self._batch.add(op)


def _batches(
    every: Sequence[CollectiveCall], found: Sequence[Plan], places: Sequence[int]
) -> list[int]:
    """Of the first of some sends and receives without any op between them how many they are."""
    runs = [
        at
        for at, (of, plan) in enumerate(zip(every, found, strict=True))
        if of["kind"] in P2P and of["kind"] != FROM_ANY and "skip" not in plan
    ]
    sizes = [0] * len(every)
    first = -1
    for before, at in pairwise([-2, *runs]):
        apart = before < 0 or places[at] != places[before] + 1
        if apart or every[at]["opened"] != every[before]["opened"]:
            first = at
        sizes[first] += 1
    return sizes
