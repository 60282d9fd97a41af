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
    line = row(SCRIPT, theirs, ours)
    assert all(part in line for part in ["`repository/train.py`", *parts])


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
    original, ours = (run(SCRIPT, tmp_path, ours=which) for which in (False, True))
    assert not original.error
    assert not ours.error
    assert (original.planned, ours.planned) == (0, 1)
    assert len(original.losses) == len(ours.losses) == 3
    assert ours.losses == pytest.approx(original.losses)


LACKS = """
import torch
import torch.distributed as dist
from absent.kernels import Kernel, compiled


class Mine(Kernel):
    pass


@compiled
def called_by_nobody():
    pass


dist.init_process_group("nccl")
weight = torch.tensor(float(open("weight").read()), requires_grad=True)
(2 * weight).backward()
"""


@pytest.mark.slow
@pytest.mark.distributed
def test_what_a_script_lacks_is_changed_stubbed_and_made(tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    path = tmp_path / "repository" / "examples" / "train.py"
    path.parent.mkdir(parents=True)
    path.write_text(LACKS)
    lacks = Script("mine", "repository", "examples/train.py")
    assert run(lacks, tmp_path, ours=False).error
    changed = lacks._replace(
        changes=(('"nccl"', '"gloo"'),),
        stubs=("absent",),
        before='open("weight", "w").write("3")',
    )
    assert run(changed, tmp_path, ours=False) == Run((6.0,))
    assert path.read_text() == LACKS


@pytest.mark.slow
@pytest.mark.distributed
def test_tables_start_the_same_under_any_plan(tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    (tmp_path / "repository").mkdir()
    losses = []
    for kind in ("table_wise", "data_parallel"):
        limits = f'constraints={{"t": ParameterConstraints(sharding_types=["{kind}"])}}'
        text = TRAINS.replace('"cpu"), 4)', f'"cpu"), 4, {limits})')
        text = text.replace("import EmbeddingSh", "import ParameterConstraints, EmbeddingSh")
        (tmp_path / "repository" / "train.py").write_text(text)
        done = run(SCRIPT, tmp_path, ours=False)
        assert not done.error, kind
        losses.append(done.losses[0])
    assert losses == pytest.approx([losses[0]] * 2)
