"""Under our plan every table is stepped by what steps it under TorchRec's, and learns the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torchrec")
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.distributed


DENSE = {"replicated as asked": {"t0"}, "replicated by TorchRec": {"t0", "t1", "t2", "t3"}}
"""Tables that the dense optimizer steps, under TorchRec's plan as under ours."""
KINDS = (
    "towers", "replicated by TorchRec", "replicated as asked",
    "pooled", "weighted", "sequences", "two modules", "position weighted",
)  # fmt: skip


@pytest.mark.slow
def test_two_ranks_lose_what_they_lose_under_torchrecs_plan(tmp_path: Path) -> None:
    """Replicated, a table would leave RowWiseAdagrad for SGD and part from the second step on."""
    run_ranks("optimizer_worker", tmp_path, *KINDS)
    for rank in range(2):
        found = json.loads((tmp_path / f"found.{rank}.json").read_text())
        assert set(found) == set(KINDS)
        for kind, of_kind in found.items():
            ours, theirs = of_kind["ours"], of_kind["theirs"]
            assert len(ours["losses"]) == 20
            assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5), kind
            assert ours["losses"][-1] < ours["losses"][0], kind
            assert ours["dense"] == theirs["dense"], kind
            dense = {table for table, kernel in ours["kernels"].items() if kernel == "dense"}
            assert dense == DENSE.get(kind, set()), kind
