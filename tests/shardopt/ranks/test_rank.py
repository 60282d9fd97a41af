"""Which rank torchrun started, on how many hosts, and how its errors read."""

from __future__ import annotations

import pytest

from predictor.errors import InputError, PlanError
from shardopt.ranks import rank as module
from shardopt.ranks.rank import (
    Rank,
    RankDiedError,
    errors_of,
    host_count,
    prepare,
    rank_of_torchrun,
)
from shardopt.ranks.realtime import Runtime


def test_torchrun_is_known_by_its_variables() -> None:
    assert rank_of_torchrun({}) is None
    assert rank_of_torchrun({"RANK": "0"}) is None
    rank = rank_of_torchrun(
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    )
    assert rank is not None
    assert (rank.index, rank.world_size, rank.local, rank.local_size) == (3, 4, 1, 2)
    with (
        pytest.raises(RankDiedError, match=r"^rank 3 died of ValueError at .*: no$"),
        errors_of(rank),
    ):
        raise ValueError("no")
    with pytest.raises(PlanError, match=r"^no$"), errors_of(rank):
        raise PlanError("no")


def test_hosts_of_torchrun_have_equally_many_ranks() -> None:
    def environment(world: int, local: int) -> dict[str, str]:
        ranks = {"RANK": "0", "LOCAL_RANK": "0"}
        return ranks | {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(local)}

    def hosts(world: int, local: int) -> int:
        join = rank_of_torchrun(environment(world, local))
        assert join is not None
        return host_count(join)

    assert [hosts(2, 2), hosts(2, 1), hosts(16, 8)] == [1, 2, 2]
    with pytest.raises(InputError, match="give every host as many ranks"):
        hosts(5, 2)


@pytest.mark.parametrize("runtime", Runtime)
def test_only_tuned_ranks_keep_memory_and_garbage(
    monkeypatch: pytest.MonkeyPatch, runtime: Runtime
) -> None:
    pytest.importorskip("torch")
    done: list[str] = []
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(module, "keep_freed_memory", lambda: done.append("keeps memory"))
    monkeypatch.setattr(module.gc, "disable", lambda: done.append("no collector"))
    monkeypatch.setattr(module.os, "sched_setaffinity", lambda *_: done.append("pinned"))
    prepare(Rank(0, 2, 0, 2), "gloo", runtime)
    more = ["no collector", "keeps memory"] if runtime is Runtime.TUNED else []
    assert done == ["pinned", *more]
