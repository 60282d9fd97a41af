"""Process groups and collectives of a benchmark, on any backend."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from .checks import COMMS, LOST, number_of, refuse
from .matching import IN_PLACE, ROOTED, CollectiveCall, Plan, plans

TIMEOUT = timedelta(minutes=5)


class RankCollectives:
    """Collectives of a rank.

    The ranks exchange their lists once, and each computes which collectives meet
    (`matching.plans`). Sizes may not fit together, as with traces of a few ranks only. Then the
    ranks exchange the largest rank's size in even parts, in memory of their own, and `notes` says
    so. `not_run` has the collectives that meet no other: position, and reason.
    """

    def __init__(self, groups: Sequence[Sequence[int]], device: torch.device) -> None:
        self.device = device
        self.notes: list[str] = []
        self.bytes: list[int] = []
        self.not_run: dict[int, str] = {}
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self._calls: list[Callable[[Sequence[Any]], Any] | None] = []
        self._at = 0
        self._wanted = [tuple(group) for group in groups]
        self._groups: list[Any] = []

    def start(self) -> None:
        """Open the process groups; collective over all ranks."""
        if not dist.is_initialized():
            self._meet()
        per_rank = gather([self._here(group) for group in self._wanted])
        every = sorted({group for groups in per_rank for group in groups if group})
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
        """Return the recorded ranks that run here; none stands for all."""
        members = tuple(sorted(rank for rank in group if rank < self.world))
        whole = len(members) == self.world or self.rank not in members
        return () if whole else members

    def begin(self) -> None:
        """Start a new iteration."""
        self._at = 0

    def run(self, kind: str, arguments: Sequence[Any], group: int) -> Any:
        """Run the next collective of the iteration, and return its work to wait for."""
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

    def agree(self, calls: Mapping[int, dict[str, Any]], specs: Mapping[int, Any]) -> None:
        """Settle with the other ranks which collectives run; collective over all ranks.

        Args:
            calls: position among all ops of an iteration -> the collective there.
            specs: shape, strides and type of each tensor.
        """
        groups = [call["keywords"]["group"] for call in calls.values()]
        descriptions = [
            describe(call, specs, self._here(self._wanted[group]))
            for call, group in zip(calls.values(), groups, strict=True)
        ]
        mine = plans(gather(descriptions))[self.rank]
        for description, plan, at, group in zip(descriptions, mine, calls, groups, strict=True):
            if "even" in plan:
                self.notes.append(
                    f"{description['kind']}: sizes of the ranks do not fit together; even parts "
                    "instead"
                )
            if "skip" in plan:
                self.not_run[at] = plan["skip"]
            self.bytes.append(description["bytes"])
            self._calls.append(self._call(description["kind"], plan, self._groups[group]))

    def _call(self, kind: str, plan: Plan, group: Any) -> Callable[[Sequence[Any]], Any] | None:
        """Return the substitute for a collective; None if it runs as it was recorded."""
        if "skip" in plan:
            return lambda _: EndedCollective()
        if "even" not in plan:
            return None
        run = exchange_evenly(kind, plan, group, self.device)
        return lambda _: run()


def gather(mine: Any) -> list[Any]:
    """Gather an object from each rank; collective over all ranks."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return every


class EndedCollective:
    """A collective that has ended, or was not run."""

    def wait(self) -> None:
        """Return at once: nothing is left to wait for."""


class Works(dict[int, Any]):
    """Collectives under way by number; one that a part alone did not start has ended."""

    def __missing__(self, number: int) -> EndedCollective:
        return EndedCollective()


def describe(
    call: Mapping[str, Any],
    specs: Mapping[int, Any],
    group: Sequence[int],
) -> CollectiveCall:
    """Describe a collective for the other ranks: kind, group, and sizes in items.

    Args:
        group: recorded ranks of its group that run here; none stands for all.
    """
    kind, arguments = call["op"].removeprefix(COMMS), call["arguments"]
    listed = [a if isinstance(a, list) else [a] for a in arguments]
    tensors = [
        [specs[n] for n in map(number_of, names) if n is not None and n in specs]
        for names in listed
    ]
    sent, received = _sent_and_received(kind, tensors)
    dtype = next((spec[2] for numbers in tensors for spec in numbers), "float32")
    plain = [a for a in arguments if isinstance(a, int)]
    return {
        "kind": kind,
        "group": list(group),
        "sent": [prod(spec[0]) for spec in sent],
        "got": [prod(spec[0]) for spec in received],
        "bytes": sum(prod(spec[0]) * getattr(torch, spec[2]).itemsize for spec in sent),
        "dtype": dtype,
        "splits": arguments[2:4] if kind == "alltoall_base_" else None,
        "root": plain[0] if kind in ROOTED and plain else 0,
    }


def _sent_and_received(kind: str, tensors: Sequence[list[Any]]) -> tuple[list[Any], list[Any]]:
    if not tensors or kind in ("barrier", "monitored_barrier_"):
        return [], []
    if kind in IN_PLACE:
        return tensors[0], tensors[0]
    return tensors[1], tensors[0]


def exchange_evenly(kind: str, plan: Plan, group: Any, device: torch.device) -> Callable[[], Any]:
    """Prepare a collective of the kind over parts of one size, in memory of its own."""
    part = torch.zeros(plan["even"], dtype=getattr(torch, plan["dtype"]), device=device)
    ranks, root = dist.get_world_size(group), plan["root"]
    whole = part.repeat(ranks)
    own = [part.clone() for _ in range(ranks)] if dist.get_rank(group) == root else []
    arguments: Sequence[Any] = ([part], root)
    if kind == "gather_":
        arguments = (own, [part], root)
    elif kind == "scatter_":
        arguments = ([part], own, root)
    elif "alltoall" in kind:
        kind, arguments = "alltoall_base_", (torch.empty_like(whole), whole, None, None)
    elif "scatter" in kind:
        kind, arguments = "_reduce_scatter_base_", (part, whole)
    elif "gather" in kind:
        kind, arguments = "_allgather_base_", (whole, part)
    elif kind not in ("broadcast_", "reduce_"):
        kind = "allreduce_"
    return lambda: CALLS[kind](arguments, group)


def _root(group: Any, root: int) -> int:
    return dist.get_global_rank(group, root % dist.get_world_size(group))


def _all_gather_coalesced(a: Sequence[Any], group: Any) -> Any:
    inputs, count = list(a[1]), len(a[1])
    lists = [list(a[0][at : at + count]) for at in range(0, len(a[0]), count)]
    return group.allgather_coalesced(lists, inputs)


def _monitored_barrier(_: Sequence[Any], group: Any) -> Any:
    if dist.get_backend(group) != "gloo":
        return dist.barrier(group=group, async_op=True)
    dist.monitored_barrier(group)
    return EndedCollective()


CALLS: dict[str, Callable[[Sequence[Any], Any], Any]] = {
    "alltoall_base_": lambda a, g: dist.all_to_all_single(
        a[0], a[1], a[2] or None, a[3] or None, g, async_op=True
    ),
    "alltoall_": lambda a, g: dist.all_to_all(list(a[0]), list(a[1]), group=g, async_op=True),
    "allreduce_": lambda a, g: dist.all_reduce(a[0][0], group=g, async_op=True),
    "allreduce_coalesced_": lambda a, g: g.allreduce_coalesced(list(a[0])),
    "broadcast_": lambda a, g: dist.broadcast(a[0][0], _root(g, a[1]), group=g, async_op=True),
    "reduce_": lambda a, g: dist.reduce(a[0][0], _root(g, a[1]), group=g, async_op=True),
    "allgather_": lambda a, g: dist.all_gather(list(a[0]), a[1][0], group=g, async_op=True),
    "allgather_coalesced_": _all_gather_coalesced,
    "_allgather_base_": lambda a, g: dist.all_gather_into_tensor(
        a[0], a[1], group=g, async_op=True
    ),
    "allgather_into_tensor_coalesced_": lambda a, g: g.allgather_into_tensor_coalesced(
        list(a[0]), list(a[1])
    ),
    "reduce_scatter_": lambda a, g: dist.reduce_scatter(
        a[0][0], list(a[1]), group=g, async_op=True
    ),
    "_reduce_scatter_base_": lambda a, g: dist.reduce_scatter_tensor(
        a[0], a[1], group=g, async_op=True
    ),
    "reduce_scatter_tensor_coalesced_": lambda a, g: g.reduce_scatter_tensor_coalesced(
        list(a[0]), list(a[1])
    ),
    "gather_": lambda a, g: dist.gather(
        a[1][0], list(a[0]) or None, _root(g, a[2]), g, async_op=True
    ),
    "scatter_": lambda a, g: dist.scatter(
        a[0][0], list(a[1]) or None, _root(g, a[2]), g, async_op=True
    ),
    "barrier": lambda _, g: dist.barrier(group=g, async_op=True),
    "monitored_barrier_": _monitored_barrier,
}
"""Collective by c10d's name -> the call of `torch.distributed`; all return work to wait for."""
