"""Process groups and collectives of a benchmark, on whatever backend there is."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=5)


class Done:
    """A collective that has ended, or was not run."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


class Collectives:
    """Runs a rank's collectives.

    The ranks of a group tell each other once what each collective exchanges. Where that does not
    fit together, as with traces of a few ranks only, all exchange as many bytes as the largest
    part, in even parts and in memory of their own; `notes` says so.
    """

    def __init__(self, groups: Sequence[Sequence[int]], device: torch.device) -> None:
        self.device = device
        self.notes: list[str] = []
        self.bytes: list[int] = []
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        self._plans: list[Callable[[], Any] | None] = []
        self._at = 0
        self.agreed = False
        self._wanted = [tuple(group) for group in groups]
        self._groups: list[Any] = []

    def start(self) -> None:
        """Open the process groups; collective over all ranks."""
        if not dist.is_initialized():
            backend = "nccl" if self.device.type == "cuda" else "gloo"
            if "MASTER_ADDR" not in os.environ and "BENCHMARK_STORE" not in os.environ:
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
            store = os.environ.get("BENCHMARK_STORE")
            dist.init_process_group(
                backend,
                init_method=f"file://{store}" if store else "env://",
                rank=self.rank,
                world_size=self.world,
                timeout=TIMEOUT,
            )
        asked: list[Any] = [None] * self.world
        dist.all_gather_object(asked, [self._here(group) for group in self._wanted])
        every = sorted({group for groups in asked for group in groups if group})
        opened = {group: dist.new_group(list(group)) for group in every}
        self._groups = [opened.get(self._here(g)) or dist.group.WORLD for g in self._wanted]

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
        at = self._at
        self._at += 1
        if not self.agreed:
            self._plans.append(self._agree(kind, arguments, self._groups[group]))
        plan = self._plans[at]
        if plan is not None:
            return plan()
        return CALLS[kind](arguments, self._groups[group])

    def _agree(self, kind: str, arguments: Sequence[Any], group: Any) -> Callable[[], Any] | None:
        """None if the collective runs as it was recorded, else what runs in its place."""
        mine = _told(kind, arguments)
        self.bytes.append(mine["bytes"])
        every: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(every, mine, group=group)
        if _fits(every):
            return None
        self.notes.append(f"{kind}: sizes of the ranks do not fit together; even parts instead")
        kinds = {of["kind"] for of in every}
        if len(kinds) > 1:
            raise SystemExit(f"the ranks' collectives differ: {', '.join(sorted(kinds))}")
        largest = max(of["items"] for of in every)
        dtype = getattr(torch, mine["dtype"])
        ranks = len(every)
        part = -(-largest // ranks) if "scatter" in kind or "alltoall" in kind else largest
        single = torch.zeros(part, dtype=dtype, device=self.device)
        whole = torch.zeros(part * ranks, dtype=dtype, device=self.device)
        return lambda: _even(kind, single, whole, group)


def _even(kind: str, single: torch.Tensor, whole: torch.Tensor, group: Any) -> Any:
    if "alltoall" in kind:
        return dist.all_to_all_single(torch.empty_like(whole), whole, group=group, async_op=True)
    if "scatter" in kind:
        return dist.reduce_scatter_tensor(single, whole, group=group, async_op=True)
    if "gather" in kind:
        return dist.all_gather_into_tensor(whole, single, group=group, async_op=True)
    return dist.all_reduce(single, group=group, async_op=True)


def _told(kind: str, arguments: Sequence[Any]) -> dict[str, Any]:
    """What another rank has to know of a collective."""
    tensors = [t for a in arguments for t in (a if isinstance(a, list) else [a])]
    tensors = [t for t in tensors if isinstance(t, torch.Tensor)]
    if not arguments:
        return {"kind": kind, "items": 0, "bytes": 0, "dtype": "float32", "splits": None, "out": 0}
    sent = tensors[-1:] if len(arguments) > 1 and kind not in IN_PLACE else tensors
    if kind == "alltoall_base_":
        sent = [arguments[1]]
    items = sum(t.numel() for t in sent)
    splits = None
    if kind == "alltoall_base_":
        splits = (list(arguments[2]), list(arguments[3]))
    return {
        "kind": kind,
        "items": items,
        "bytes": sum(t.numel() * t.element_size() for t in sent),
        "dtype": str(tensors[0].dtype).removeprefix("torch.") if tensors else "float32",
        "splits": splits,
        "out": arguments[0].numel() if isinstance(arguments[0], torch.Tensor) else 0,
    }


IN_PLACE = frozenset({"allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_"})


def _fits(every: Sequence[dict[str, Any]]) -> bool:
    first = every[0]
    if any(of["kind"] != first["kind"] or of["dtype"] != first["dtype"] for of in every):
        return False
    ranks = len(every)
    if first["kind"] != "alltoall_base_":
        parts = {"_reduce_scatter_base_": (ranks, 1), "_allgather_base_": (1, ranks)}
        into, of_one = parts.get(first["kind"], (0, 0))
        return all(
            of["items"] == first["items"] and (not into or of["out"] * into == of["items"] * of_one)
            for of in every
        )
    table = []
    for of in every:
        got, given = of["splits"]
        given = given or [of["items"] // ranks] * ranks
        got = got or [of["out"] // ranks] * ranks
        if len(given) != ranks or len(got) != ranks:
            return False
        table.append((got, given))
    return all(table[j][0][i] == table[i][1][j] for i in range(ranks) for j in range(ranks))


def _all_to_all_single(a: Sequence[Any], group: Any) -> Any:
    return dist.all_to_all_single(a[0], a[1], a[2] or None, a[3] or None, group, async_op=True)


def _all_reduce(a: Sequence[Any], group: Any) -> Any:
    return dist.all_reduce(a[0][0], group=group, async_op=True)


def _all_reduce_coalesced(a: Sequence[Any], group: Any) -> Any:
    return dist.all_reduce_coalesced(a[0], group=group, async_op=True)


def _root(group: Any, root: int) -> int:
    return dist.get_global_rank(group, root % dist.get_world_size(group))


def _broadcast(a: Sequence[Any], group: Any) -> Any:
    return dist.broadcast(a[0][0], _root(group, a[1]), group=group, async_op=True)


def _reduce(a: Sequence[Any], group: Any) -> Any:
    return dist.reduce(a[0][0], _root(group, a[1]), group=group, async_op=True)


def _all_gather(a: Sequence[Any], group: Any) -> Any:
    size = dist.get_world_size(group)
    outputs = a[0][:size] if isinstance(a[0], list) else [a[0]]
    return dist.all_gather(outputs, a[1][0], group=group, async_op=True)


def _gather_single(a: Sequence[Any], group: Any) -> Any:
    return dist.all_gather_into_tensor(_one(a[0]), _one(a[1]), group=group, async_op=True)


def _scatter_single(a: Sequence[Any], group: Any) -> Any:
    return dist.reduce_scatter_tensor(_one(a[0]), _one(a[1]), group=group, async_op=True)


def _reduce_scatter(a: Sequence[Any], group: Any) -> Any:
    return dist.reduce_scatter(_one(a[0]), list(a[1]), group=group, async_op=True)


def _all_to_all(a: Sequence[Any], group: Any) -> Any:
    return dist.all_to_all(list(a[0]), list(a[1]), group=group, async_op=True)


def _barrier(_: Sequence[Any], group: Any) -> Any:
    return dist.barrier(group=group, async_op=True)


def _one(given: Any) -> Any:
    return given[0] if isinstance(given, list) else given


CALLS: dict[str, Callable[[Sequence[Any], Any], Any]] = {
    "alltoall_base_": _all_to_all_single,
    "alltoall_": _all_to_all,
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce_coalesced,
    "broadcast_": _broadcast,
    "reduce_": _reduce,
    "allgather_": _all_gather,
    "_allgather_base_": _gather_single,
    "allgather_into_tensor_coalesced_": _gather_single,
    "reduce_scatter_": _reduce_scatter,
    "_reduce_scatter_base_": _scatter_single,
    "reduce_scatter_tensor_coalesced_": _scatter_single,
    "barrier": _barrier,
}
"""Collective by c10d's name -> the call of `torch.distributed`; all return what to wait for."""
