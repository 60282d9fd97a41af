"""One rank whose collectives are captured: `collectives_worker FOLDER`, of a job of two."""

import os
import sys
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

from tests.distributed.ranks import join_group, leave_group
from tests.shardopt.replay.captured import capture

RANK, RANKS = int(os.environ.get("RANK", "0")), 2
OTHER = 1 - RANK
PEER_TAG = 3


def made(*shape: int) -> torch.Tensor:
    """A tensor that ops of the trace make."""
    return torch.ones(*shape)


def all_ranks() -> None:
    """Each collective of c10d that gloo has."""
    work = dist.all_reduce(made(5), async_op=True)
    dist.all_reduce_coalesced([made(2), made(3)])
    dist.broadcast(made(4), 1)
    dist.reduce(made(6), 1)
    dist.all_gather([made(3), made(3)], made(3))
    dist.all_gather_into_tensor(made(6), made(3))
    dist.all_gather_coalesced([[made(2), made(3)], [made(2), made(3)]], [made(2), made(3)])
    dist.reduce_scatter(made(3), [made(3), made(3)])
    dist.reduce_scatter_tensor(made(3), made(6))
    dist.gather(made(4), [made(4), made(4)] if RANK == 0 else None, dst=0)
    dist.scatter(made(4), [made(4), made(4)] if RANK == 1 else None, src=1)
    dist.all_to_all([made(3), made(3)], [made(3), made(3)])
    splits = [1, 2] if RANK == 0 else [2, 3]
    dist.all_to_all_single(made(sum(splits)), made(sum(splits)), splits, splits)
    with dist.distributed_c10d._coalescing_manager():
        dist.all_gather_into_tensor(made(6), made(3))
        dist.all_gather_into_tensor(made(4), made(2))
    with dist.distributed_c10d._coalescing_manager():
        dist.reduce_scatter_tensor(made(3), made(6))
        dist.reduce_scatter_tensor(made(2), made(4))
    dist.barrier()
    dist.monitored_barrier()
    work.wait()


def one_to_one() -> None:
    """Sends and receives: blocking, both ways at once, as a batch, and from anyone."""
    tensor = made(4)
    dist.send(tensor, 1) if RANK == 0 else dist.recv(tensor, 0)
    there, back = made(4), made(8)
    works = [dist.isend(there, OTHER, tag=PEER_TAG), dist.irecv(back[:4], OTHER, tag=PEER_TAG)]
    for work in works:
        work.wait()
    ops = [dist.P2POp(dist.isend, made(2), OTHER), dist.P2POp(dist.irecv, made(2), OTHER)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    dist.send(made(7), 1) if RANK == 0 else dist.recv(made(7))
    torch.relu(back)


@cache
def mesh() -> DeviceMesh:
    """Of both ranks; made before the capture, as it looks up values."""
    return DeviceMesh("cpu", list(range(RANKS)))


def in_wrappers() -> None:
    """Functional collectives, and a product of DTensors."""
    whole = dist.group.WORLD
    torch.relu(functional.all_reduce(made(4), "sum", whole))
    torch.relu(functional.all_gather_tensor(made(4), 0, whole))
    torch.relu(functional.reduce_scatter_tensor(made(4), "sum", 0, whole))
    torch.relu(functional.all_to_all_single(made(4), [2, 2], [2, 2], whole))
    left = distribute_tensor(made(4, 4), mesh(), [Shard(0)])
    right = distribute_tensor(made(4, 4), mesh(), [Shard(1)])
    (left @ right).full_tensor()


def main(job: Path) -> None:
    """Capture each of the three."""
    join_group(job)
    for step in (all_ranks, one_to_one, in_wrappers):
        capture(step, job / step.__name__, warm_up=1, rank=RANK)
    leave_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
