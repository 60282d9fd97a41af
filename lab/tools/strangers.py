"""Training scripts of others on two CPU ranks, under TorchRec's planner and under ours.

    python -m lab strangers FOLDER [--write] [-k NAME]

FOLDER has checkouts of the repositories in `REPOSITORIES`, by those names. Each script runs twice
on two gloo ranks, as it is: in the second run the name `EmbeddingShardingPlanner` stands for our
planner, as if that one line of the script were changed. The loss of a script is the tensor that it
calls `backward` on. docs/hook.md has the table; `--write` writes it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lab.tools.torchrec_own import IN_PLACE, PAGE, ROOT

REPOSITORIES = {
    "torchrec": "https://github.com/meta-pytorch/torchrec",
    "dlrm": "https://github.com/facebookresearch/dlrm",
}
LIMIT_S = 300
DLRM = (
    *("--num_embeddings", "2000", "--batch_size", "64", "--limit_train_batches", "20"),
    *("--limit_val_batches", "1", "--limit_test_batches", "1", "--epochs", "1"),
    *("--embedding_dim", "16", "--dense_arch_layer_sizes", "32,16"),
    *("--over_arch_layer_sizes", "32,1", "--learning_rate", "0.1", "--seed", "1"),
)


class Script(NamedTuple):
    """A script with its arguments, in a repository of `REPOSITORIES`."""

    name: str
    repository: str
    path: str
    arguments: tuple[str, ...] = ()


SCRIPTS = (
    Script("DLRM, dot", "dlrm", "torchrec_dlrm/dlrm_main.py", DLRM),
    Script(
        "DLRM, DCN v2",
        "dlrm",
        "torchrec_dlrm/dlrm_main.py",
        (*DLRM, "--interaction_type", "dcn", "--dcn_low_rank_dim", "8"),
    ),
    Script(
        "DLRM, projection",
        "dlrm",
        "torchrec_dlrm/dlrm_main.py",
        (
            *DLRM,
            *("--interaction_type", "projection"),
            *("--interaction_branch1_layer_sizes", "32,64"),
            *("--interaction_branch2_layer_sizes", "32,64"),
        ),
    ),
    Script("golden training", "torchrec", "examples/golden_training/train_dlrm.py"),
    Script(
        "golden training, data-parallel",
        "torchrec",
        "examples/golden_training/train_dlrm_data_parallel.py",
    ),
    Script(
        "bert4rec",
        "torchrec",
        "examples/bert4rec/bert4rec_main.py",
        ("--dataset_name", "random", "--emb_dim", "32", "--max_len", "16", "--num_epochs", "1"),
    ),
)
STEPS = 20
"""After which a script is ended."""
RECORD = f"""\
import atexit
import json
import os
import random
import sys

import torch

random.seed(0)
torch.manual_seed(0)
losses, planned, backward = [], [], torch.Tensor.backward


def recorded(self, *args, **more):
    losses.append(float(self.detach().sum()))
    if len(losses) > {STEPS}:
        write()
        torch.distributed.barrier()  # nobody leaves while another waits for its part
        os._exit(0)
    return backward(self, *args, **more)


torch.Tensor.backward = recorded


@atexit.register
def write():
    with open(os.path.join(os.environ["LOSSES"], os.environ["RANK"]), "w") as file:
        json.dump(dict(losses=losses[:{STEPS}], planned=len(planned)), file)
"""
"""Runs in the ranks' processes before the script; its losses are kept by rank."""
COUNT = """
planned_by = ShardoptPlanner.plan


def counted(self, *args, **more):
    planned.append(1)
    return planned_by(self, *args, **more)


ShardoptPlanner.plan = counted
"""
"""Behind `IN_PLACE`: that our planner was asked, and no other."""
HOOK = """\
import os

if "RANK" in os.environ:
"""


class Run(NamedTuple):
    """One run of a script: losses of rank 0, and the line that says why it ended; "" if well.

    Args:
        planned: times that our planner was asked on rank 0.
    """

    losses: tuple[float, ...]
    error: str = ""
    planned: int = 0


def run_scripts(folder: Path, *, write: bool, only: str) -> int:
    """Run the scripts, and print the table; 1 if one trains under TorchRec's planner alone.

    Args:
        folder: of the checkouts.
        only: scripts with this in their name.
    """
    found = []
    for script in (s for s in SCRIPTS if only in s.name):
        theirs, ours = (run(script, folder, ours=ours) for ours in (False, True))
        found.append((script, theirs, ours))
        print(row(script, theirs, ours), flush=True)
    if write:
        PAGE.write_text(with_rows(PAGE.read_text(), [row(*of) for of in found]))
    return int(any(ours.error and not theirs.error for _, theirs, ours in found))


def run(script: Script, folder: Path, *, ours: bool) -> Run:
    """Run a script on two ranks of this machine."""
    with tempfile.TemporaryDirectory() as made:
        written = HOOK + _indented(RECORD + (IN_PLACE + COUNT if ours else ""))
        (Path(made) / "sitecustomize.py").write_text(written)
        repository = (folder / script.repository).resolve()
        paths = [made, str(repository), str(ROOT), os.environ.get("PYTHONPATH", "")]
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc_per_node", "2", str(repository / script.path), *script.arguments]
        try:
            done = subprocess.run(
                launch,
                cwd=made,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(paths),
                    "LOSSES": made,
                    "XDG_CACHE_HOME": made,  # no answer of before
                },
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Run((), f"not done after {LIMIT_S} s")
        kept = Path(made) / "0"
        told = json.loads(kept.read_text()) if kept.exists() else {}
        error = _cause(done.stderr) if done.returncode else ""
        return Run(tuple(told.get("losses", ())), error, told.get("planned", 0))


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" if line else "\n" for line in text.splitlines())


def _cause(stderr: str) -> str:
    """The error of the first rank that has one."""
    errors = re.findall(r"^(?:\[rank\d\]: )?([\w.]*(?:Error|Exception)\b.*)$", stderr, re.MULTILINE)
    return errors[0][:100] if errors else "a rank ended without a word"


def row(script: Script, theirs: Run, ours: Run) -> str:
    """What came of a script, as the page has it."""
    return f"| {script.name} | `{script.repository}/{script.path}` | {_outcome(theirs, ours)} |"


def _outcome(theirs: Run, ours: Run) -> str:
    if theirs.error or ours.error:
        told = {"TorchRec's": theirs.error, "ours": ours.error}
        if theirs.error == ours.error:
            return f"under neither: {theirs.error}"
        return "; ".join(f"{whose}: {error or 'runs'}" for whose, error in told.items())
    if not ours.planned:
        return "runs, and asks no planner"
    if not theirs.losses:
        return "runs under both, and trains nothing"
    pairs = list(zip(theirs.losses, ours.losses, strict=False))
    apart = max(abs(a - b) / max(abs(a), 1e-9) for a, b in pairs)
    same = len(theirs.losses) == len(ours.losses)
    steps = f"{len(theirs.losses)} steps" + ("" if same else f" and {len(ours.losses)}")
    return f"{steps}, loss {ours.losses[0]:.4f} to {ours.losses[-1]:.4f}, apart by {apart:.0e}"


BEGIN, END = "<!-- written by python -m lab strangers -->\n\n", "<!-- end of scripts -->"
HEAD = "| script | file | two gloo ranks |\n|---|---|---|"


def with_rows(page: str, rows: Sequence[str]) -> str:
    """The page, with these rows in its table, in the place of those of the same scripts."""
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    known = {_name(line): line for line in [*table.splitlines()[2:], *rows] if line}
    kept = [known[script.name] for script in SCRIPTS if script.name in known]
    return before + BEGIN + "\n".join([HEAD, *kept]) + "\n\n" + END + after


def _name(row: str) -> str:
    return row.split("|")[1].strip()


def listed(page: str) -> list[str]:
    """Names of the scripts that the page's table has."""
    _, _, rest = page.partition(BEGIN)
    return [_name(line) for line in rest.partition(END)[0].splitlines()[2:] if line]
