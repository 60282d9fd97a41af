"""Trial of every command of an installed wheel, in an environment without torch and scipy.

    python -m lab try-wheel VENV/bin/shardopt

Each command must work, or end with exit code 2 and name the missing extra; none may end in a
traceback. `make wheel` calls this.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODEL = str(ROOT / "configs" / "models" / "dlrm_dcnv2_criteo1tb.yaml")
EXTRA = "pip install 'shardopt["
TIME_LIMIT_S = 600


@dataclass(frozen=True)
class Case:
    """Command with its expected exit code and output.

    Args:
        says: text in stdout if the exit code is 0, else in stderr.
        writes: file that must exist afterwards.
    """

    words: str
    says: str = ""
    code: int = 0
    writes: str = ""


def lacks(words: str, says: str = EXTRA) -> Case:
    """Return the case of a command that cannot run here and names the remedy."""
    return Case(words, says, code=2)


CASES = (
    Case("--help", "plan"),
    Case("--version", "shardopt"),
    Case("hardware", "h100-sxm"),
    Case("hardware b200 --json", '"name": "b200"'),
    Case("stats ids.tsv --quiet -o stats.npz", writes="stats.npz"),
    lacks("stats ids.parquet"),
    Case(f"plan {MODEL} --gpus 8 --effort 0.05 --quiet -o plan.json", "ms", writes="plan.json"),
    Case(f"plan {MODEL} --gpus 8 --effort 0.05 --quiet --tune qcomm --trials 2", "qcomm"),
    Case(f"predict {MODEL} plan.json --quiet", "plan.json: "),
    Case(f"explain {MODEL} plan.json --quiet --html page.html", "ms", writes="page.html"),
    Case("diff plan.json plan.json", "No table differs"),
    Case("trace trace.json --quiet", "ms"),
    lacks("calibrate --quick"),
    lacks(f"bench run {MODEL} plan.json"),
    lacks("bench generate trace.json -o benchmark", "execution trace"),
    lacks("bench replay made"),
    lacks(f"bench search {MODEL} --gpus 8"),
)


def write_inputs(folder: Path) -> None:
    """Write the files that the commands read: ids, a trace of one step, and a dummy benchmark."""
    row = "\t".join(["0", *["1"] * 13, *["a1"] * 26])
    (folder / "ids.tsv").write_text(f"{row}\n" * 3)
    (folder / "ids.parquet").write_bytes(b"PAR1")
    (folder / "trace.json").write_text(json.dumps(_trace()))
    benchmark = folder / "made"
    benchmark.mkdir()
    (benchmark / "data.json").write_text('{"schema": "shardopt.replay/1", "world_size": 1}')
    (benchmark / "benchmark.py").write_text("import torch\n")


def _trace() -> dict[str, Any]:
    """Return a Kineto trace of two steps with one kernel each."""
    events: list[dict[str, Any]] = []
    for step in range(2):
        start = 1000.0 * step
        events += [
            _event("user_annotation", f"ProfilerStep#{step}", start, 999),
            _event("cpu_op", "aten::mm", start + 10, 50),
            _event("cuda_runtime", "cudaLaunchKernel", start + 20, 10, correlation=step + 1),
            _event("kernel", "mm", start + 50, 200, correlation=step + 1, stream=7, device=0),
        ]
    return {"traceEvents": events, "deviceProperties": [{"id": 0, "name": "Some GPU"}]}


def _event(kind: str, name: str, start: float, length: float, **args: int) -> dict[str, Any]:
    thread = args.get("stream", 1)
    place = {"pid": 0 if "stream" in args else 1, "tid": thread, "ts": start, "dur": length}
    return {"ph": "X", "cat": kind, "name": name, **place, "args": args}


def problem_of(case: Case, program: Path, folder: Path) -> str | None:
    """Run a command; return its problem, or None."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [str(program), *case.words.split()],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
    )
    output = done.stderr if case.code else done.stdout
    if done.returncode != case.code:
        return f"exit code {done.returncode} instead of {case.code}: {done.stderr.strip()[-500:]}"
    if case.says not in output or "Traceback" in done.stderr:
        return f"does not say {case.says!r}: {output.strip()[-500:]}"
    if case.writes and not (folder / case.writes).stat().st_size:
        return f"{case.writes} is empty"
    return None


def try_all(program: Path) -> int:
    """Run the cases in sequence; return exit code 1 if one fails."""
    failed = 0
    with tempfile.TemporaryDirectory(prefix="try-wheel-") as name:
        folder = Path(name)
        write_inputs(folder)
        for case in CASES:
            problem = problem_of(case, program, folder)
            if problem is not None:
                failed += 1
                print(f"shardopt {case.words}: {problem}")
    print(f"{len(CASES) - failed} of {len(CASES)} commands did what they should")
    return 1 if failed else 0
