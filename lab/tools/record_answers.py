"""Records what shardopt answers in some 100 cases, to show what a refactoring changed.

``python -m lab record-answers record OUT --data DIR`` runs every case with the `shardopt` of
``--tree`` (another checkout, this one unless given) and writes one JSON file a case; a case that is
there already is not run again. Plans are predicted and explained as ``--plans`` has them, another
recording, so that predictions of the same plans are compared.
``python -m lab record-answers compare BEFORE AFTER`` lists what differs, and exits with 1 if a
figure differs by more than 1e-9 of it, a plan is slower by 0.3 % or a gap wider by 0.3 points.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import isclose
from pathlib import Path
from typing import Any

from lab.programs import make_parser

ROOT = Path(__file__).resolve().parents[2]
MODELS = "configs/models"
TOLERANCE, SLOWER, WIDER = 1e-9, 0.003, 0.003

VOLATILE = frozenset({"versions", "search_seconds", "seconds", "elapsed_s", "date"})
"""Keys whose values tell of the run, not of the answer."""

PLANS = {
    # name: model, GPUs, hardware, further flags
    "criteo1tb-8-h100": ("dlrm_dcnv2_criteo1tb", 8, "h100-sxm", ""),
    "criteo1tb-16-a100": ("dlrm_dcnv2_criteo1tb", 16, "a100-80gb", "--effort 0.5"),
    "criteo1tb-16-h200": ("dlrm_dcnv2_criteo1tb", 16, "h200-sxm", "--effort 0.5"),
    "criteo1tb-8-b200": ("dlrm_dcnv2_criteo1tb", 8, "b200", "--effort 0.5"),
    "criteo1tb-64-v100": ("dlrm_dcnv2_criteo1tb", 64, "v100-32gb", "--effort 0.2"),
    "criteo1tb-8-a100-40": ("dlrm_dcnv2_criteo1tb", 8, "a100-40gb", "--effort 0.5"),
    "criteo1tb-8-tight": ("dlrm_dcnv2_criteo1tb", 8, "h100-sxm", "--effort 0.3 --hbm-gib 18"),
    "criteo1tb-8-l4": ("dlrm_dcnv2_criteo1tb", 8, "l4", "--effort 0.3"),
    "criteo1tb-4-gb200": ("dlrm_dcnv2_criteo1tb", 4, "gb200", "--effort 0.3"),
    "kaggle-2-cpu": ("dlrm_criteo_kaggle", 2, "cpu-gloo", "--batch-size 512"),
    "kaggle-8-h100": ("dlrm_criteo_kaggle", 8, "h100-sxm", "--effort 0.5"),
    "kaggle-1-h100": ("dlrm_criteo_kaggle", 1, "h100-sxm", "--effort 0.5"),
    "rm1-8-h100": ("deeprecsys_rm1", 8, "h100-sxm", "--effort 0.5"),
    "rm2-8-h100": ("deeprecsys_rm2", 8, "h100-sxm", "--effort 0.5"),
    "rm3-8-h100": ("deeprecsys_rm3", 8, "h100-sxm", "--effort 0.5"),
    "rm2-16-v100": ("deeprecsys_rm2", 16, "v100-32gb", "--effort 0.3 --seed 3"),
    "rm1-4-t4": ("deeprecsys_rm1", 4, "t4", "--effort 0.3"),
    "rm3-2-cpu": ("deeprecsys_rm3", 2, "cpu-gloo", "--batch-size 256 --effort 0.5"),
    "synthetic100-8-h100": ("synthetic_100", 8, "h100-sxm", "--effort 0.5"),
    "synthetic100-16-h100": ("synthetic_100", 16, "h100-sxm", "--effort 0.2 --seed 1"),
    "synthetic100-8-nodes2": ("synthetic_100", 8, "a100-80gb", "--effort 0.2 --gpus-per-node 4"),
    "synthetic100-8-tight": ("synthetic_100", 8, "h100-sxm", "--effort 0.2 --hbm-gib 30"),
    "synthetic100-8-optuna": ("synthetic_100", 8, "h100-sxm", "--effort 0.2 --search optuna"),
    "rm2-4-cpsat": ("deeprecsys_rm2", 4, "h100-sxm", "--effort 0.2 --search cpsat"),
    "synthetic1000-128-h100": ("synthetic_1000", 128, "h100-sxm", "--effort 0.1"),
    "rm2-tune": (
        "deeprecsys_rm2",
        8,
        "h100-sxm",
        "--effort 0.1 --tune batch_size,qcomm --trials 6",
    ),
}
SUITES = (
    "collectives",
    "gemm",
    "mlperf-dlrm",
    "torchrec-p4d",
    "torchrec-cpu",
    "against-torchrec",
    "transformers-cpu",
    "replay",
    "transformers",
    "traces",
)
TRACES = (
    "dlrm_kineto.tar.gz",
    "hta_nccl_parser_rank0of2.json.gz",
    "hta_trace_diff_control_rank3of8.json.gz",
    "hta_trace_diff_test_rank1of2.json.gz",
    "param_resnet_kineto.json.gz",
    "param_linear_kineto.json.gz",
)
BENCHMARKS = {
    "linear": ("param_linear_et.json.gz", ""),
    "resnet": ("param_resnet_et.json.gz", ""),
    "dlrm": ("dlrm_pytorch_et.tar.gz", ""),
    "dlrm-batch-2": ("dlrm_pytorch_et.tar.gz", "--scale batch=2"),
    "hta-control": ("hta_trace_diff_control_rank3of8.json.gz", ""),
}
PROFILES = ("a100-40gb", "b200", "cpu-gloo", "h100-sxm", "v100-32gb")


def cases(data: Path, work: Path, plans: Path) -> Iterator[tuple[str, list[str]]]:
    """Every case: its name, and what follows `shardopt` on its command line.

    Args:
        work: folder for the files that commands write.
        plans: folder with the plan files that commands read.
    """
    for name, (model, gpus, hardware, flags) in PLANS.items():
        base = [f"{MODELS}/{model}.yaml", "--gpus", str(gpus), "--hardware", hardware]
        plan = ["plan", *base, *flags.split(), "--json", "-o", str(work / f"{name}.plan.json")]
        yield f"plan-{name}", plan
    for name, (model, _, _, flags) in PLANS.items():
        if "--tune" in flags:
            continue
        given = [f"{MODELS}/{model}.yaml", str(plans / f"{name}.plan.json")]
        yield f"predict-{name}", ["predict", *given, "--json"]
        if "synthetic" not in name:
            yield f"explain-{name}", ["explain", *given, "--json"]
    old, new = plans / "criteo1tb-8-h100.plan.json", plans / "criteo1tb-8-tight.plan.json"
    yield "diff", ["diff", str(old), str(new), "--json"]
    moves = ["--from", str(new), "--max-moves", "3", "--effort", "0.2", "--json"]
    yield "plan-from", ["plan", f"{MODELS}/dlrm_dcnv2_criteo1tb.yaml", *moves]
    for name in PROFILES:
        yield f"hardware-{name}", ["hardware", name, "--json"]
    for suite in SUITES:
        inside = suite in ("torchrec-cpu", "against-torchrec", "transformers-cpu", "replay")
        where = [] if inside else ["--data", str(data)]
        yield f"validate-{suite}", ["validate", suite, *where, "--json"]
    for trace in TRACES:
        name = trace.split(".")[0]
        yield f"trace-{name}", ["trace", str(data / "traces" / trace), "--json"]
    for name, (trace, flags) in BENCHMARKS.items():
        out = ["-o", str(work / f"bench-{name}")]
        source = str(data / "traces" / trace)
        yield f"generate-{name}", ["bench", "generate", source, *flags.split(), *out, "--json"]


def record(out: Path, data: Path, tree: Path, jobs: int, plans_of: Path) -> None:
    """Run the cases that ``out`` lacks; plans first, as other cases read their files.

    Args:
        plans_of: the recording whose plan files are read; it may be ``out``.
    """
    work = out / "files"
    work.mkdir(parents=True, exist_ok=True)
    todo = [
        (n, c) for n, c in cases(data, work, plans_of / "files") if not (out / f"{n}.json").exists()
    ]
    plans = [case for case in todo if case[0].startswith("plan-") and case[0] != "plan-from"]
    rest = [case for case in todo if case not in plans]
    with ThreadPoolExecutor(jobs) as pool:
        for group in (plans, rest):
            for name in pool.map(lambda case: _run(case[0], case[1], out, tree), group):
                print(name, flush=True)


def _run(name: str, command: Sequence[str], out: Path, tree: Path) -> str:
    program = "lab" if command[0] == "validate" and (tree / "lab").is_dir() else "shardopt"
    path = os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", program, *command],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    answer: dict[str, Any] = {"exit": done.returncode}
    if done.returncode:
        answer["stderr"] = done.stderr[-2000:]
    else:
        answer["stdout"] = _kept(json.loads(done.stdout), out)
    if name.startswith("generate-"):
        answer["files"] = _digests(out / "files" / f"bench-{name.removeprefix('generate-')}")
    temporary = out / f"{name}.part"
    temporary.write_text(json.dumps(answer, indent=1, sort_keys=True))
    temporary.rename(out / f"{name}.json")
    return name


def _digests(folder: Path) -> dict[str, str]:
    """Digests of a benchmark's data and programs, without the runtime, which is our own code."""
    files = sorted(p for p in folder.rglob("*") if p.is_file() and "runtime" not in p.parts)
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()[:16] for p in files
    }


def _kept(value: Any, out: Path) -> Any:
    if isinstance(value, dict):
        return {k: _kept(v, out) for k, v in value.items() if k not in VOLATILE}
    if isinstance(value, list):
        return [_kept(v, out) for v in value]
    return value.replace(str(out), "OUT") if isinstance(value, str) else value


def differences(before: Any, after: Any, where: str = "") -> Iterator[tuple[bool, str]]:
    """Every value that differs: whether it is a text on both sides, and where and how."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted({*before, *after}):
            if key not in before or key not in after:
                yield False, f"{where}.{key}: only {'before' if key in before else 'after'}"
            else:
                yield from differences(before[key], after[key], f"{where}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for i, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{where}[{i}]")
    elif _is_number(before) and _is_number(after) and isclose(before, after, rel_tol=TOLERANCE):
        return
    elif before != after:
        is_text = isinstance(before, str) and isinstance(after, str)
        yield is_text, f"{where}: {str(before)[:80]} -> {str(after)[:80]}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def plan_differences(before: Any, after: Any) -> Iterator[tuple[bool, str]]:
    """Of a search, whose plan may be another: what is worse than allowed."""
    if before["exit"] or after["exit"]:
        yield from differences(before, after)
        return
    old, new = before["stdout"], after["stdout"]
    slower = new["iteration_ms"] / old["iteration_ms"] - 1
    wider = (new["gap"] or 0) - (old["gap"] or 0)
    if slower > SLOWER or wider > WIDER:
        yield False, f": {slower:+.2%} time, {100 * wider:+.2f} points of gap"


def compare(before: Path, after: Path) -> int:
    """Print what differs between two recordings; 1 if anything but wording does."""
    names = sorted({p.name for folder in (before, after) for p in folder.glob("*.json")})
    reworded, changed, missing = 0, 0, 0
    for name in names:
        if not (before / name).exists() or not (after / name).exists():
            print(f"{name}: in one recording only")
            missing += 1
            continue
        texts = [(folder / name).read_text() for folder in (before, after)]
        is_search = name.startswith("plan-")
        found = list((plan_differences if is_search else differences)(*map(json.loads, texts)))
        figures = [line for is_text, line in found if not is_text]
        changed += bool(figures)
        reworded += bool(found) and not figures
        for line in (figures or [line for _, line in found])[:10]:
            print(f"{name}{line}")
    print(
        f"{len(names)} cases: {changed} with other figures, {reworded} in other words only, "
        f"{missing} in one recording only"
    )
    return int(changed + missing > 0)


def main(argv: Sequence[str] | None = None) -> int:
    """The two commands."""
    parser = make_parser("record-answers", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run the cases and write their answers")
    recording.add_argument("out", type=Path, help="folder for the answers")
    recording.add_argument("--data", type=Path, required=True, help="folder of public files")
    recording.add_argument("--tree", type=Path, default=ROOT, help="checkout to run")
    recording.add_argument("--plans", type=Path, help="recording whose plan files are read")
    recording.add_argument("--jobs", type=int, default=2, help="cases at a time")
    comparing = commands.add_parser("compare", help="list what differs between two recordings")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    args = parser.parse_args(argv)
    if args.command == "compare":
        return compare(args.before, args.after)
    out = args.out.resolve()
    plans = (args.plans or out).resolve()
    record(out, args.data.resolve(), args.tree.resolve(), args.jobs, plans)
    return 0
