"""Training scripts of others on two CPU ranks, under TorchRec's planner and under ours.

    python -m lab strangers FOLDER [--write] [-k NAME]

FOLDER has checkouts of the repositories in `REPOSITORIES`, by those names. Each script runs twice
on two gloo ranks: in the second run the name `EmbeddingShardingPlanner` stands for our planner, as
if that one line of the script were changed. What else differs from the checkout is here, by script.
The loss of a script is the tensor that it calls `backward` on. docs/hook.md has the table;
`--write` writes it.
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
from typing import NamedTuple

from lab.tools.torchrec_own import IN_PLACE, PAGE, ROOT

REPOSITORIES = {
    "torchrec": "https://github.com/meta-pytorch/torchrec",
    "dlrm": "https://github.com/facebookresearch/dlrm",
    "TorchEasyRec": "https://github.com/alibaba/TorchEasyRec",
    "generative-recommenders": "https://github.com/meta-recsys/generative-recommenders",
}
LIMIT_S = 300


class Script(NamedTuple):
    """A script with its arguments, in a repository of `REPOSITORIES`.

    Args:
        changes: texts of the Python files in the script's top folder, and what stands there
            instead.
        stubs: modules that are imported and not called.
        before: Python that makes its data, run in the folder that the ranks start in.
        loop: of `lab.tools.loops`, for a model that no script trains; `path` defines the model.
    """

    name: str
    repository: str
    path: str
    arguments: tuple[str, ...] = ()
    changes: tuple[tuple[str, str], ...] = ()
    stubs: tuple[str, ...] = ()
    before: str = ""
    loop: str = ""


DLRM = (
    *("--num_embeddings", "2000", "--batch_size", "64", "--limit_train_batches", "20"),
    *("--limit_val_batches", "1", "--limit_test_batches", "1", "--epochs", "1"),
    *("--embedding_dim", "16", "--dense_arch_layer_sizes", "32,16"),
    *("--over_arch_layer_sizes", "32,1", "--learning_rate", "0.1", "--seed", "1"),
)
ON_CPUS = (
    ('"nccl"', '"gloo"'),
    ("Backend.NCCL", "Backend.GLOO"),
    ('torch.device(f"cuda:{rank}")', 'torch.device("cpu")'),
    ('torch.device(f"cuda:{local_rank}")', 'torch.device("cpu")'),
    ("torch.cuda.set_device(device)", "pass"),
    ('compute_device="cuda"', 'compute_device="cpu"'),
)
HSTU = (
    *ON_CPUS,
    ("HammerKernel.TRITON\n", "HammerKernel.PYTORCH\n"),
    ("HASH_SIZE = 10_000_000", "HASH_SIZE = 1_000"),
    ("max_seq_len: int = 16384", "max_seq_len: int = 256"),
    (  # of a later torchrec
        "from torchrec.modules.sorted_index_select import maybe_sorted_index_select",
        "maybe_sorted_index_select = lambda values, at, _: values.index_select(0, at)",
    ),
    (  # torchrun has started the ranks
        "mp.start_processes(",
        'return _main_func(int(os.environ["RANK"]), WORLD_SIZE, os.environ["MASTER_PORT"], '
        "gin_path, args.mode)\n    mp.start_processes(",
    ),
)
PROTOBUF_4 = """return {
        of.name: of.enum_type.values_by_number[of.default_value].name
        if of.enum_type
        else of.default_value
        for of in config.DESCRIPTOR.fields
        if not of.message_type and not of.containing_oneof
    }"""
"""It gave these defaults, and later ones leave them out."""


def easy_rec(name: str, config: str) -> Script:
    """TorchEasyRec's training of one of its configs, on data that its own tests make."""
    return Script(
        f"TorchEasyRec, {name}",
        "TorchEasyRec",
        "tzrec/train_eval.py",
        ("--pipeline_config_path", "small.config"),
        stubs=(
            *("alibabacloud_credentials", "common_io", "confluent_kafka", "faiss", "graphlearn"),
            *("odps", "pyfg", "safetensors", "triton", "urllib3"),
        ),
        changes=(
            ("including_default_value_fields=True, ", ""),
            ("return json_format.MessageToDict(", PROTOBUF_4 + " | json_format.MessageToDict("),
        ),
        before=f"""\
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
""",
    )


TOWERS = (("[self._device] if self._device is not None else None", "None"),)
"""DDP takes no CPU as its device."""
TEST_MODEL = "torchrec/distributed/test_utils/test_model.py"
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
        "bert4rec, row-wise Adagrad for Adam",  # which FBGEMM has not on CPUs
        "torchrec",
        "examples/bert4rec/bert4rec_main.py",
        (
            *("--dataset_name", "random", "--emb_dim", "32", "--max_len", "16"),
            *("--num_epochs", "20", "--random_user_count", "100", "--random_size", "3000"),
        ),
        changes=(("EmbOptimType.ADAM", "EmbOptimType.EXACT_ROWWISE_ADAGRAD"),),
    ),
    Script(
        "two towers, without the index",
        "torchrec",
        "examples/retrieval/two_tower_train.py",
        stubs=("faiss",),
    ),
    Script(
        "Ray's DLRM, small tables",
        "torchrec",
        "examples/ray/train_torchrec.py",
        changes=(("1024**2", "1024"),),
    ),
    Script(
        "cloud quickstart",
        "torchrec",
        "examples/cloud_deployment/quickstart/train_torchrec_quickstart.py",
        ("--batch_size", "64", "--num_embeddings", "2000"),
        changes=(*ON_CPUS, ("Enumerator(\n", "Enumerator(batch_size=64,\n")),  # it needs one
    ),
    Script(
        "transfer learning",
        "torchrec",
        "examples/transfer_learning/train_from_pretrained_embedding.py",
        changes=(*ON_CPUS, ("    invoke_main()", "    main()")),  # torchrun has started the ranks
    ),
    Script(
        "quantised DLRM",
        "torchrec",
        "torchrec/inference/dlrm_packager.py",
        ("--num_embeddings", "1000", "--output_path", "packaged.pt"),
        changes=(("module(world_size=1)", 'module(world_size=1, device="cpu")'),),
    ),
    Script("embedding towers", "torchrec", TEST_MODEL, changes=TOWERS, loop="tower"),
    Script("collection of towers", "torchrec", TEST_MODEL, changes=TOWERS, loop="towers"),
    Script(
        "DMPCollection, two copies",
        "torchrec",
        TEST_MODEL,
        changes=(('device.type == "cuda" or device.type == "mtia"', "True"),),
        loop="collection",
    ),
    Script(
        "managed collisions",
        "torchrec",
        "examples/zch/sparse_arch.py",
        changes=(("EvictionPolicy(),", "EvictionPolicy(), buckets=buckets,"),),  # one on each rank
        loop="collisions",
    ),
    easy_rec("multi-tower DIN", "tzrec/tests/configs/multi_tower_din_mock.config"),
    easy_rec("DBMTL", "tzrec/tests/configs/dbmtl_has_sequence_mock.config"),
    easy_rec("DeepFM", "examples/deepfm_criteo.config"),
    easy_rec("DLRM", "examples/dlrm_criteo.config"),
    easy_rec("MMoE", "examples/mmoe_taobao.config"),
    easy_rec("PLE", "examples/ple_taobao.config"),
    Script(
        "HSTU, PyTorch kernels, small",
        "generative-recommenders",
        "generative_recommenders/dlrm_v3/train/train_ranker.py",
        changes=HSTU,
        stubs=("triton",),
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
"""Runs in the ranks' processes before the script; its losses are kept by rank. The weights of a
table are drawn by its name: TorchRec draws them shard by shard, so another plan would start
elsewhere."""
COUNT = """
planned_by = ShardoptPlanner.plan


def counted(self, *args, **more):
    planned.append(1)
    return planned_by(self, *args, **more)


ShardoptPlanner.plan = counted
"""
"""Behind `IN_PLACE`: that our planner was asked, and no other."""
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
"""Modules that take any name, where nothing real is installed."""
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
        stubs = STUBS.format(names=script.stubs) if script.stubs else ""
        (Path(made) / "sitecustomize.py").write_text(stubs + written)
        repository = (folder / script.repository).resolve()
        changed = _changed(script, repository, Path(made)) if script.changes else repository
        paths = [made, str(changed), str(repository), str(ROOT), os.environ.get("PYTHONPATH", "")]
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launch += ["--nproc_per_node", "2"]
        launch += ["-m", "lab.tools.loops", script.loop] if script.loop else []
        launch += [] if script.loop else [str(changed / script.path), *script.arguments]
        for command in [[sys.executable, "-c", script.before], launch]:
            try:
                done = subprocess.run(
                    command,
                    cwd=made,
                    env={
                        **os.environ,
                        "PYTHONPATH": os.pathsep.join(paths),
                        "CHECKOUT": str(repository),
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
            if done.returncode:
                break
        kept = Path(made) / "0"
        told = json.loads(kept.read_text()) if kept.exists() else {}
        error = _cause(done.stderr) if done.returncode else ""
        return Run(tuple(told.get("losses", ())), error, told.get("planned", 0))


def _changed(script: Script, repository: Path, made: Path) -> Path:
    """A copy of the script's top folder with its changes, in a folder of its own."""
    top, copied = script.path.partition("/")[0], made / "changed"
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
        return "plans under both, and trains nothing"
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
