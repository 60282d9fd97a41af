"""Stands in for what TorchRec's reshard does wrong when it sends shards (torchrec 1.8, 1.9).

Why: docs/decisions/0066.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shardopt.extras import needs_torchrec

with needs_torchrec():
    import torch.distributed as dist
    from torchrec.distributed.sharding import dynamic_sharding

MOST_TAG = 0x7FFFFFFF
"""Tags of gloo's messages have 31 bits."""


@contextmanager
def sound_transfers() -> Iterator[None]:
    """While it lasts, reshard's messages have the same tags on all ranks, what a rank sends itself
    is copied, and what is sent lies in one piece.

    TorchRec tags messages with Python's hash of texts, which differs from process to process: under
    gloo, which matches tags, ranks would wait for ever. A column shard that stays where it is while
    others of its table move, and columns of it that do, are sent from a rank to itself, which gloo
    cannot; and columns of an optimizer state are sent as they lie, which no backend takes.
    """
    if not hasattr(dynamic_sharding, "_generate_tag"):
        yield
        return
    theirs = dynamic_sharding._generate_tag, dynamic_sharding.dist
    dynamic_sharding._generate_tag, dynamic_sharding.dist = _tag, _Messages()
    try:
        yield
    finally:
        dynamic_sharding._generate_tag, dynamic_sharding.dist = theirs


def _tag(*words: Any, **named: Any) -> int:
    text = repr((words, sorted(named.items())))
    return zlib.crc32(text.encode()) & MOST_TAG


class _Messages:
    """`torch.distributed`, but for how a batch of messages is sent."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def batch_isend_irecv(self, ops: Sequence[Any]) -> list[Any]:
        """One work for each op, in their order."""
        me = dist.get_rank()
        kept = {op.tag: op.tensor for op in ops if op.peer == me and op.op is dist.isend}
        far = [op for op in ops if op.peer != me]
        for op in ops:
            if op.peer == me and op.op is dist.irecv:
                op.tensor.copy_(kept[op.tag])
            elif op.op is dist.isend:
                op.tensor = op.tensor.contiguous()
        works = dist.batch_isend_irecv(far) if far else []
        each = iter(works if len(works) == len(far) else works * len(far))  # NCCL has one for all
        return [_DONE if op.peer == me else next(each) for op in ops]


class _Done:
    def wait(self) -> None:
        pass


_DONE = _Done()
