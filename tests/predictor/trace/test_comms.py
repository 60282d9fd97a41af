"""Names of collectives, and the bytes that they exchange."""

import pytest

from predictor.trace.comms import collective_kind
from predictor.trace.events import CollectiveCall


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", "send_recv"),
        ("ncclDevKernel_ReduceScatter_Sum_f16_RING_LL(x)", "reduce_scatter"),
        ("ncclDevKernel_AllGather_RING_LL(x)", "all_gather"),
        ("ncclKernel_Broadcast_RING_LL_Sum_int8_t(x)", "broadcast"),
        ("ncclAllReduceRingLLKernel_sum_f32(x)", "all_reduce"),
        ("_allgather_base", "all_gather"),
        ("all_to_allv", "all_to_all"),
        ("nccl:reduce", "reduce"),
        ("ncclDevKernel_Generic(x)", "other"),
    ],
)
def test_kinds(name: str, kind: str) -> None:
    assert collective_kind(name) == kind


def test_splits_of_another_iteration_are_left_out() -> None:
    """They must add up to what this one sent."""
    first = CollectiveCall(size_bytes=8, output_bytes=6)
    second = CollectiveCall(send_bytes=(4, 4), receive_bytes=(4, 4))
    assert first.or_else(second) == CollectiveCall(size_bytes=8, output_bytes=6, send_bytes=(4, 4))
