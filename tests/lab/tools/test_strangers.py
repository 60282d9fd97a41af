"""Scripts of others under both planners: what is made of their runs, and one that is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.tools.strangers import SCRIPTS, Run, Script, listed, row, run, with_rows
from lab.tools.torchrec_own import PAGE

SCRIPT = Script("mine", "repository", "train.py")


@pytest.mark.parametrize(
    ("theirs", "ours", "parts"),
    [
        (Run((2.0, 1.0)), Run((2.0, 1.001), planned=1), ["2 steps", "1e-03"]),
        (Run((2.0, 1.0)), Run((2.0,), planned=1), ["2 steps and 1"]),
        (Run((2.0,)), Run((2.0,)), ["no planner"]),
        (Run((), "NameError: x"), Run((), "NameError: x"), ["neither", "NameError: x"]),
        (Run((2.0,)), Run((), "PlannerError: y"), ["TorchRec's: runs", "ours: PlannerError: y"]),
    ],
)
def test_a_row_says_how_both_runs_went(theirs: Run, ours: Run, parts: list[str]) -> None:
    told = row(SCRIPT, theirs, ours)
    assert all(part in told for part in ["`repository/train.py`", *parts])


def test_the_page_has_every_script() -> None:
    page = PAGE.read_text()
    assert listed(page) == [script.name for script in SCRIPTS]
    again = with_rows(page, [row(SCRIPTS[1], Run((), "OSError: x"), Run((), "OSError: x"))])
    assert listed(again) == listed(page)
    assert "under neither: OSError: x" in again
    assert again.partition("<!-- end of scripts")[2] == page.partition("<!-- end of scripts")[2]


TRAINS = """
import torch
import torch.distributed as dist
import torchrec
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology

dist.init_process_group("gloo")
table = torchrec.EmbeddingBagConfig(
    name="t", num_embeddings=100, embedding_dim=8, feature_names=["f"]
)
model = torchrec.EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
planner = EmbeddingShardingPlanner(Topology(2, "cpu"), 4)
sharders = torchrec.distributed.sharding_plan.get_default_sharders()
plan = planner.collective_plan(model, sharders, dist.group.WORLD)
model = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
ids = torchrec.KeyedJaggedTensor.from_lengths_sync(["f"], torch.arange(4), torch.ones(4).long())
for _ in range(3):
    model(ids).values().square().sum().backward()
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_a_script_runs_with_one_name_changed(tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "train.py").write_text(TRAINS)
    theirs, ours = (run(SCRIPT, tmp_path, ours=which) for which in (False, True))
    assert not theirs.error
    assert not ours.error
    assert (theirs.planned, ours.planned) == (0, 1)
    assert len(theirs.losses) == len(ours.losses) == 3
    assert ours.losses == pytest.approx(theirs.losses)
