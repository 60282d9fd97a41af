"""Which collectives of the ranks meet: told from what each says, without any process."""

from typing import Any

import pytest

pytest.importorskip("torch")

from shardopt.replay.runtime.matching import fits, plans

Told = dict[str, Any]


def told(kind: str, sent: list[int], got: list[int] | None = None, **more: Any) -> Told:
    plain = {"group": [], "dtype": "float32", "root": 0, "splits": None}
    return {"kind": kind, "sent": sent, "got": sent if got is None else got, **plain, **more}


@pytest.mark.parametrize(
    ("kind", "sent", "got"),
    [
        ("allreduce_", [5], [5]),
        ("allreduce_coalesced_", [2, 3], [2, 3]),
        ("allgather_", [3], [3, 3]),
        ("allgather_coalesced_", [2, 3], [2, 3, 2, 3]),
        ("_allgather_base_", [3], [6]),
        ("allgather_into_tensor_coalesced_", [3, 2], [6, 4]),
        ("reduce_scatter_", [3, 3], [3]),
        ("_reduce_scatter_base_", [6], [3]),
        ("reduce_scatter_tensor_coalesced_", [6, 4], [3, 2]),
        ("alltoall_", [3, 3], [3, 3]),
        ("barrier", [], []),
    ],
)
def test_sizes_of_two_ranks_that_fit_do_not_fit_three(
    kind: str, sent: list[int], got: list[int]
) -> None:
    assert fits([told(kind, sent, got)] * 2)
    if kind in ("allreduce_", "allreduce_coalesced_", "barrier"):
        assert fits([told(kind, sent, got)] * 3)
    else:
        assert not fits([told(kind, sent, got)] * 3)
    if sent:
        assert not fits([told(kind, sent, got), told(kind, [sent[0] + 1, *sent[1:]], got)])
        assert not fits([told(kind, sent, got), told(kind, sent, got, dtype="int64")])


def test_splits_of_an_all_to_all_must_mirror_each_other() -> None:
    first = told("alltoall_base_", [3], [3], splits=([1, 2], [1, 2]))
    mirrored = told("alltoall_base_", [5], [5], splits=([2, 3], [2, 3]))
    assert fits([first, mirrored])
    wrong = told("alltoall_base_", [5], [5], splits=([1, 4], [2, 3]))
    assert not fits([first, wrong])
    even = told("alltoall_base_", [6], [6], splits=([], []))
    assert fits([even] * 3)


def test_only_the_root_of_a_gather_has_parts() -> None:
    root, non_root = told("gather_", [4], [4, 4]), told("gather_", [4], [])
    assert fits([root, non_root])
    assert not fits([non_root, root])
    assert fits([{**non_root, "root": 1}, {**root, "root": 1}])
    assert not fits([root, non_root, non_root])
    assert fits([told("scatter_", [4, 4], [4]), told("scatter_", [], [4])])
    assert not fits([non_root, non_root])
    assert not fits([{**non_root, "root": 2}, {**non_root, "root": 2}])
    # who broadcasts matters to nobody's size
    assert fits([told("broadcast_", [4], root=2)] * 2)


def test_what_the_others_do_not_have_is_left_out_and_the_rest_meets() -> None:
    reduce, gather, wait = (told(kind, [2], [4]) for kind in ("reduce_", "allgather_", "barrier"))
    rank_0, rank_1 = plans([[reduce, gather, wait], [reduce, wait]])
    assert ["skip" in plan for plan in rank_0] == [False, True, False]
    assert rank_0[0] == rank_1[0] == {}
    assert len(rank_1) == 2


def test_groups_have_an_order_of_their_own() -> None:
    pair = told("allreduce_", [2], group=[0, 1])
    everyone = told("allreduce_", [3])
    matched = plans([[pair, everyone], [everyone, pair], [everyone]])
    assert matched == [[{}, {}], [{}, {}], [{}]]


def test_the_largest_part_is_exchanged_where_sizes_do_not_fit() -> None:
    matched = plans([[told("allreduce_", [5])], [told("allreduce_", [8])]])
    assert [calls[0]["even"] for calls in matched] == [8, 8]
    matched = plans([[told("alltoall_base_", [7], [7], splits=([3, 4], [3, 4]))]])
    assert matched[0][0]["even"] == 7
    matched = plans([[told("scatter_", [], [4], root=1)]])
    assert matched[0][0]["even"] == 4
    matched = plans([[told("gather_", [4], [], root=1)]])
    assert matched[0][0]["even"] == 4
    matched = plans([[told("_reduce_scatter_base_", [10], [5])]] * 3)
    assert [calls[0]["even"] for calls in matched] == [4, 4, 4]
