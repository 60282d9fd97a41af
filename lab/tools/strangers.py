"""Third-party training scripts on two CPU ranks, under TorchRec's planner and ours.

    python -m lab strangers FOLDER [--write] [-k NAME]

FOLDER has checkouts of the repositories in `REPOSITORIES`, by those names. Each script runs twice
on two gloo ranks: in the second run the name `EmbeddingShardingPlanner` is our planner, as if that
one line of the script were changed. strangers.yaml has the other differences from the checkout, by
script. The loss of a script is the tensor that it calls `backward` on.
docs/compatibility.md has the table; `--write` writes it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from lab.tools.torchrec_own import IN_PLACE, PAGE, ROOT

REPOSITORIES = {
    "torchrec": "https://github.com/meta-pytorch/torchrec",
    "dlrm": "https://github.com/facebookresearch/dlrm",
    "TorchEasyRec": "https://github.com/alibaba/TorchEasyRec",
    "generative-recommenders": "https://github.com/meta-recsys/generative-recommenders",
}
LIMIT_S = 300


class Script(NamedTuple):
    """Entry of `strangers.yaml`.

    Args:
        before: Python code that makes its data, run in the working folder of the ranks.
    """

    name: str
    repository: str
    path: str
    arguments: tuple[str, ...] = ()
    changes: tuple[tuple[str, str], ...] = ()
    stubs: tuple[str, ...] = ()
    before: str = ""
    loop: str = ""


EASY_REC_DATA = """\
import os

os.environ.update(PYTHON_RANDOM_SEED="0", NUMPY_MANUAL_SEED="0")

from tzrec.protos.data_pb2 import FG_NONE
from tzrec.tests.utils import load_config_for_test
from tzrec.utils.config_util import load_pipeline_config, save_message

config = load_pipeline_config(os.path.join(os.environ["CHECKOUT"], "{config}"))
config.train_input_path = config.eval_input_path = ""
config.data_config.fg_mode = FG_NONE  # ids and numbers as they are, without pyfg
for feature in config.feature_configs:
    of = getattr(feature, feature.WhichOneof("feature"))
    if getattr(of, "num_buckets", 0) > 10**5:
        of.num_buckets = 10**5
save_message(config, "./theirs.config")
config = load_config_for_test("./theirs.config", os.getcwd(), num_rows=16384)
config.eval_input_path = ""
config.data_config.batch_size = 256
save_message(config, "./small.config")
"""


def _script(entry: dict[str, Any]) -> Script:
    config = entry.pop("config", None)
    return Script(
        **entry
        | {
            "arguments": tuple(" ".join(entry.get("arguments", ())).split()),
            "changes": tuple(entry.get("changes", {}).items()),
            "stubs": tuple(entry.get("stubs", ())),
            "before": EASY_REC_DATA.format(config=config) if config else "",
        }
    )


SCRIPTS = tuple(
    map(_script, yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")))
)
STEPS = 20
"""Steps after which a script is ended."""
RECORD = f"""\
import atexit
import json
import os
import random
import sys

import zlib

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

random.seed(0)
torch.manual_seed(0)
losses, planned, backward = [], [], torch.Tensor.backward
sharded = DistributedModelParallel.__init__


def started(self, *args, **more):
    sharded(self, *args, **more)
    for key, weight in self.state_dict().items():
        if "embedding_bags." in key or "embeddings." in key:
            start(key, weight)
    torch.manual_seed(0)


def start(key, weight):
    rows, drawn = weight.size(0), torch.Generator().manual_seed(zlib.crc32(key.encode()))
    whole = torch.empty(weight.size()).uniform_(-(rows**-0.5), rows**-0.5, generator=drawn)
    if isinstance(weight, ShardedTensor):
        held = [(of.tensor, of.metadata.shard_offsets) for of in weight.local_shards()]
    elif isinstance(weight, DTensor):
        held = list(zip(weight.to_local().local_shards(), weight.to_local().local_offsets()))
    else:
        held = [(weight, (0, 0))]
    for shard, at in held:
        shard.copy_(whole[at[0] : at[0] + shard.size(0), at[1] : at[1] + shard.size(1)])


DistributedModelParallel.__init__ = started


def recorded(self, *args, **more):
    losses.append(float(self.detach().sum()))
    if len(losses) > {STEPS}:
        write()
        torch.distributed.barrier()  # nobody leaves while another waits for its part
        os._exit(0)
    return backward(self, *args, **more)


torch.Tensor.backward = recorded


def write():
    with open(os.path.join(os.environ["LOSSES"], os.environ["RANK"]), "w") as file:
        json.dump(dict(losses=losses[:{STEPS}], planned=len(planned)), file)


@atexit.register
def end():
    write()
    if losses and not hasattr(sys, "last_type"):
        os._exit(0)  # gloo's threads may abort a process that Python tears down
"""
"""Runs in the ranks' processes before the script and records its losses by rank. The weights of a
table are drawn by its name: TorchRec draws them shard by shard, so another plan would have other
initial weights."""
COUNT = """
planned_by = ShardoptPlanner.plan


def counted(self, *args, **more):
    planned.append(1)
    return planned_by(self, *args, **more)


ShardoptPlanner.plan = counted
"""
"""Appended to `IN_PLACE`: counts the calls of our planner."""
STUBS = """\
import importlib.machinery
import sys
import types
import unittest.mock


class Stubs:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in {names}:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        made = types.ModuleType(spec.name)
        made.__getattr__ = attribute
        return made

    def exec_module(self, module):
        pass


class Anything:
    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        return attribute(name)


def attribute(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (Anything,), {{}}) if name[0].isupper() else unittest.mock.MagicMock()


sys.meta_path.append(Stubs())
"""
"""Stub modules with any attribute, for packages that are not installed."""
HOOK = """\
import os

if "RANK" in os.environ:
"""


class Run(NamedTuple):
    """Run of a script: losses of rank 0, and its error; "" if it ended well.

    Args:
        planned: number of calls of our planner on rank 0.
    """

    losses: tuple[float, ...]
    error: str = ""
    planned: int = 0


def run_scripts(folder: Path, *, write: bool, only: str) -> int:
    """Run the scripts and print the table; return 1 if one trains only under TorchRec's planner.

    Args:
        folder: folder of the checkouts.
        only: scripts with this in their name.
    """
    results = []
    for script in (s for s in SCRIPTS if only in s.name):
        theirs, ours = (run(script, folder, ours=ours) for ours in (False, True))
        results.append((script, theirs, ours))
        print(row(script, theirs, ours), flush=True)
    if write:
        PAGE.write_text(with_rows(PAGE.read_text(), [row(*result) for result in results]))
    return int(any(ours.error and not theirs.error for _, theirs, ours in results))


def run(script: Script, folder: Path, *, ours: bool) -> Run:
    """Run a script on two ranks of this machine."""
    with tempfile.TemporaryDirectory() as work:
        written = HOOK + _indented(RECORD + (IN_PLACE + COUNT if ours else ""))
        stubs = STUBS.format(names=script.stubs) if script.stubs else ""
        (Path(work) / "sitecustomize.py").write_text(stubs + written)
        repository = (folder / script.repository).resolve()
        changed = _changed(script, repository, Path(work)) if script.changes else repository
        paths = [work, str(changed), str(repository), str(ROOT), os.environ.get("PYTHONPATH", "")]
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc_per_node", "2"]
        launch += ["-m", "lab.tools.loops", script.loop] if script.loop else []
        launch += [] if script.loop else [str(changed / script.path), *script.arguments]
        for command in [[sys.executable, "-c", script.before], launch]:
            try:
                done = subprocess.run(
                    command,
                    cwd=work,
                    env={
                        **os.environ,
                        "PYTHONPATH": os.pathsep.join(paths),
                        "CHECKOUT": str(repository),
                        "LOSSES": work,
                        "XDG_CACHE_HOME": work,  # no cached answer
                    },
                    capture_output=True,
                    text=True,
                    timeout=LIMIT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return Run((), f"not done after {LIMIT_S} s")
            if done.returncode:
                break
        losses_file = Path(work) / "0"
        recorded = json.loads(losses_file.read_text()) if losses_file.exists() else {}
        error = _cause(done.stderr) if done.returncode else ""
        return Run(tuple(recorded.get("losses", ())), error, recorded.get("planned", 0))


def _changed(script: Script, repository: Path, work: Path) -> Path:
    """Copy the script's top folder with its changes into its own folder."""
    top, copied = script.path.partition("/")[0], work / "changed"
    shutil.copytree(repository / top, copied / top)
    for file in (copied / top).rglob("*.py"):
        text = file.read_text()
        for old, new in script.changes:
            text = text.replace(old, new)
        file.write_text(text)
    return copied


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" if line else "\n" for line in text.splitlines())


def _cause(stderr: str) -> str:
    """Return the first rank's error."""
    errors = re.findall(r"^(?:\[rank\d\]: )?([\w.]*(?:Error|Exception)\b.*)$", stderr, re.MULTILINE)
    return errors[0][:100] if errors else "a rank ended without a word"


def row(script: Script, theirs: Run, ours: Run) -> str:
    """Return a script's result as a row of the page."""
    return f"| {script.name} | `{script.repository}/{script.path}` | {_outcome(theirs, ours)} |"


def _outcome(theirs: Run, ours: Run) -> str:
    if theirs.error or ours.error:
        errors = {"TorchRec's": theirs.error, "ours": ours.error}
        if theirs.error == ours.error:
            return f"under neither: {theirs.error}"
        return "; ".join(f"{whose}: {error or 'runs'}" for whose, error in errors.items())
    if not ours.planned:
        return "runs, and asks no planner"
    if not theirs.losses:
        return "plans under both, and trains nothing"
    pairs = list(zip(theirs.losses, ours.losses, strict=False))
    apart = max(abs(a - b) / max(abs(a), 1e-9) for a, b in pairs)
    same = len(theirs.losses) == len(ours.losses)
    steps = f"{len(theirs.losses)} steps" + ("" if same else f" and {len(ours.losses)}")
    return f"{steps}, loss {ours.losses[0]:.4f} to {ours.losses[-1]:.4f}, apart by {apart:.0e}"


BEGIN, END = "<!-- written by python -m lab strangers -->\n\n", "<!-- end of scripts -->"
HEAD = "| script | file | two gloo ranks |\n|---|---|---|"


def with_rows(page: str, rows: Sequence[str]) -> str:
    """Return the page with these rows in its table, replacing those of the same scripts."""
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    line_of = {_name(line): line for line in [*table.splitlines()[2:], *rows] if line}
    lines = [line_of[script.name] for script in SCRIPTS if script.name in line_of]
    return before + BEGIN + "\n".join([HEAD, *lines]) + "\n\n" + END + after


def _name(row: str) -> str:
    return row.split("|")[1].strip()


def listed(page: str) -> list[str]:
    """Return the names of the scripts in the page's table."""
    _, _, rest = page.partition(BEGIN)
    return [_name(line) for line in rest.partition(END)[0].splitlines()[2:] if line]
