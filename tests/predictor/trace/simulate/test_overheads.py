"""The five overheads of a hand-made step, and tables made of them."""

from __future__ import annotations

import pytest

from predictor.trace.events import RankTrace
from predictor.trace.simulate.host import Kind, Piece
from predictor.trace.simulate.overheads import TracedOverheads
from predictor.trace.simulate.step import TracedHosts
from tests.predictor.trace.handmade import PAGEABLE, Recorder


def one_step() -> RankTrace:
    """One operator with two launches, one without, then a copy to the host."""
    record = Recorder()
    record.step(0, 200)
    record.op("aten::addmm", 10, 50)
    record.launch((16, 20), (22, 30))
    record.launch((27, 32), (34, 60))
    record.op("aten::view", 57, 66)
    record.op("aten::item", 70, 120)
    record.launch((75, 112), (88, 90), name=PAGEABLE, runtime="cudaMemcpyAsync")
    return record.trace()


def table(trace: RankTrace) -> TracedOverheads:
    return TracedHosts.of([trace]).pooled()


def test_the_five_kinds() -> None:
    overheads = table(one_step())
    assert overheads.find(Kind.T1, ("<aten::view", ">aten::addmm")).us == pytest.approx(7)
    assert overheads.find(Kind.T2, ("aten::addmm",)).us == pytest.approx(6)
    assert overheads.find(Kind.T3, ("aten::addmm",)).us == pytest.approx(18)
    assert overheads.find(Kind.T4, ("cudaLaunchKernel",)).us == pytest.approx(4.5)
    assert overheads.find(Kind.T5, ("aten::addmm",)).us == pytest.approx(7)
    assert overheads.find(Kind.T5, ("aten::view",)).us == pytest.approx(9)


def test_unseen_operators_take_the_shared_time() -> None:
    overheads = table(one_step())
    shared = overheads.find(Kind.T2, ("aten::unseen", "0"))
    assert shared.count == 2
    assert shared.us == pytest.approx((6 + 5) / 2)
    assert TracedOverheads().us(Piece(Kind.T2, ("x",), 1.0)) == 0
