"""Commands on mutated input, many in one process: whatever it is, no traceback and no hang.

Run as ``python -m tests.shardopt.cli.fuzz FOLDER FAMILY SEED COUNT``; prints a line of JSON: what
went wrong, the exit codes, and the most memory the process had.
"""

from __future__ import annotations

import ast
import contextlib
import gzip
import io
import json
import math
import random
import re
import shutil
import signal
import sys
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml

from predictor.hardware.loader import load_hardware
from shardopt.bench import confirm as bench_confirm
from shardopt.bench import run as bench_run
from shardopt.bench.job import Job
from shardopt.calibrate.points import REFERENCE_KERNELS
from shardopt.cli.app import main
from shardopt.ranks.launch import OnReport
from tests.hostile import NUMBERS, TEXTS, damage, mutate, scalar
from tests.predictor.trace.synthetic import OLD, OLDEST, RECENT, execution, kineto
from tests.shardopt.bench import test_learn as job
from tests.shardopt.config.conftest import GOOD
from tests.shardopt.config.test_ops_file import MODEL as CAPTURED
from tests.shardopt.config.test_ops_file import OPS
from tests.shardopt.conftest import MODEL, a_plan
from tests.shardopt.conftest import table as placed

ALLOWED = frozenset({0, 2, 3, 4})
STARTS_PROCESSES = (
    (bench_run, "run_ranks"),
    (bench_confirm, "run_ranks"),
)
"""Functions that start processes; families put others in their place."""
HANG_S = 60
Words = list[str]
Family = Callable[[random.Random], Words]
"""Writes files into the current folder; the words of a command on them."""


def plan_document() -> dict[str, Any]:
    """A plan of the model on two ranks with every field set somewhere."""
    document = a_plan()
    tables = document.pop("tables")
    cached = {"compute_kernel": "fused_uvm_caching", "cache_params": {"load_factor": 0.2}}
    tables["users"] |= {**cached, "enforce_hbm": False, "module": "ebc"}
    tables["items"]["sharding_type"] = "row_wise"
    for rank, shard in enumerate(tables["items"]["shards"]):
        shard |= {"offset": [25000 * rank, 0], "size": [25000, 64]}
    return {
        "schema": document["schema"],
        "model": {"name": "small", "sha256": "0" * 64},
        **document,
        "local_world_size": 2,
        "batch_size": 32768,
        "seed": 0,
        "iteration_ms": 20.5,
        "lower_bound_ms": 20.0,
        "versions": {"shardopt": "0"},
        "tables": tables,
    }


def put(name: str, content: Any) -> str:
    """Write a file here, what is neither text nor bytes as JSON, and return its name.

    JSON is YAML, and holds characters that YAML's writer refuses.
    """
    if not isinstance(content, bytes):
        content = (content if isinstance(content, str) else json.dumps(content)).encode()
    Path(name).write_bytes(content)
    return name


def model_and_plan() -> Words:
    return [put("model.yaml", MODEL), put("plan.json", plan_document())]


def json_or_not(rng: random.Random) -> Words:
    return ["--json"] if rng.random() < 0.5 else []


def plan_fields(rng: random.Random) -> Words:
    """Plans with fields of any kind, and plans with damaged bytes."""
    text = json.dumps(mutate(rng, plan_document()))
    damaged = rng.random() < 0.1
    plan = put("plan.json", damage(rng, text.encode(), len(text)) if damaged else text)
    model, baseline = put("model.yaml", MODEL), put("other.json", plan_document())
    json_flag = json_or_not(rng)
    words = rng.choice((["predict", model, plan], ["diff", baseline, plan], ["diff", plan, plan]))
    words = ["explain", model, plan] if rng.random() < 0.1 else words
    return [*words, *json_flag]


def models(rng: random.Random) -> Words:
    """Model files and captured dense parts: any values, and damaged bytes."""
    full_shard = (0, [0, 0], [1000, 64])
    tables = {"t": placed("table_wise", "fused", full_shard)}
    if rng.random() < 0.5:
        put("m.ops.json", mutate(rng, OPS, 4))
        model = put("model.yaml", CAPTURED)
    else:
        shapes = {"t_0": [40_000_000, 128], "t_1": [400_000, 128]}
        tables = {n: placed("table_wise", "fused", (0, [0, 0], s)) for n, s in shapes.items()}
        damaged = rng.random() < 0.3
        text = GOOD if damaged else json.dumps(mutate(rng, yaml.safe_load(GOOD), 4))
        model = put("model.yaml", damage(rng, text.encode(), len(text)) if damaged else text)
    plan = {"schema": "shardopt.plan/1", "world_size": 2, "tables": tables}
    return ["predict", model, put("plan.json", plan), *json_or_not(rng)]


def names(rng: random.Random) -> Words:
    """Names of models, features, tables, modules and columns; names of ops and their parameters."""
    if rng.random() < 0.5:
        return _op_names(rng)
    document = yaml.safe_load(MODEL)
    plan = plan_document()
    for table in document["tables"]:
        old = table["name"]
        if rng.random() < 0.4:
            table["name"] = rng.choice(TEXTS)
            plan["tables"][table["name"]] = plan["tables"].pop(old)
        if rng.random() < 0.3:
            table["module"] = rng.choice(TEXTS)
        if rng.random() < 0.3:
            table["features"][0]["name"] = rng.choice(TEXTS)
        if rng.random() < 0.1:
            table[rng.choice(TEXTS)] = scalar(rng)
    document["name"] = rng.choice(TEXTS)
    plan["model"]["name"] = rng.choice(TEXTS)
    files = [put("model.yaml", document), put("plan.json", plan)]
    return [rng.choice(("predict", "explain", "predict")), *files]


def _op_names(rng: random.Random) -> Words:
    document: Any = execution(nested=rng.random() < 0.5)
    kind = rng.choice(("Tensor", "int", "float[]", "Scalar", "str", "Device", "ScalarType", "bool"))
    for node in document["nodes"]:
        attributes = {a["name"]: a for a in node.get("attrs", ())}
        name = rng.choice((*TEXTS, *(f"x::{text}" for text in TEXTS), "aten::relu", "c10d::main"))
        if rng.random() < 0.5:
            continue
        star = rng.choice(("", "*, "))
        called = rng.choice(("self", *TEXTS))
        schema = f"{name}({star}{kind} {called}, Tensor b) -> Tensor"
        node["name"] = name
        if "op_schema" in attributes:
            attributes["op_schema"]["value"] = schema
        else:
            node["op_schema"] = schema
    return ["bench", "generate", put("et.json", document), "-o", "benchmark"]


def traces(rng: random.Random) -> Words:
    """Kineto and execution traces with anything in them, and damaged bytes of them."""
    docs = [execution(nested=True), execution(), kineto(schema=RECENT), kineto(schema=OLD, steps=1)]
    docs.append(kineto(schema=OLDEST, steps=2))
    paths = []
    for number in range(rng.randint(1, 2)):
        content = json.dumps(mutate(rng, rng.choice(docs), most=6))
        if rng.random() < 0.2:
            content = damage(rng, content.encode(), len(content))
            content = gzip.compress(content, mtime=0) if rng.random() < 0.3 else content
        paths.append(put(f"rank{number}.json", content))
    if rng.random() < 0.5:
        return ["bench", "generate", *paths, "-o", "benchmark"]
    return ["trace", *paths, *json_or_not(rng)]


STATS = {"user.counts": np.array([1.0, 2.0]), "user.weights": np.array([0.5, 0.5])}
TYPES = ("<i8", "<f8", "|b1", "|O", "<U4", "|V0", "<M8[s]", "<c16", "|i1", ">i4")
SHAPES = ("(3,)", "()", "(0,)", "(-1,)", "(10**9,)", "(9999999999999, 2)", "(3, 2)", "3", "(3,1,1)")


def _head(rng: random.Random) -> bytes:
    """The head of an array as nobody writes it, with some data."""
    order, shape = rng.choice(("True", "False", "None", "1")), rng.choice(SHAPES)
    kind = repr(rng.choice(TYPES)) if rng.random() < 0.8 else rng.choice(("[1]", "()", "[('a',)]"))
    text = f"{{'descr': {kind}, 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + rng.randbytes(48)


def npy(rng: random.Random) -> Words:
    """Damaged arrays of ids, by head and by bytes."""
    path = Path("ids.npy")
    if rng.random() < 0.4:
        path.write_bytes(_head(rng))
    else:
        np.save(path, np.arange(60).reshape(20, 3) % 7)
        path.write_bytes(damage(rng, path.read_bytes(), 128))
    return ["stats", "ids.npy", *json_or_not(rng)]


def npz(rng: random.Random) -> Words:
    """Damaged archives: of ids, and of the distributions that a model names."""
    path = Path("s.npz")
    arrays: dict[str, Any] = dict(STATS) if rng.random() < 0.5 else {"a": np.arange(40) % 5}
    if rng.random() < 0.2:
        arrays[rng.choice([*arrays, "b"])] = np.zeros(rng.choice([10**6, 9 * 10**6]))
        np.savez_compressed(path, **arrays)
    elif rng.random() < 0.5:
        np.savez(path, **arrays)
        path.write_bytes(damage(rng, path.read_bytes(), 400))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            for name in (*arrays, "user.range_rows", "user.rows"):
                archive.writestr(f"{name}.npy", _head(rng))
    if rng.random() < 0.4:
        return ["stats", "s.npz"]
    words = ["predict", *model_and_plan()]
    put("model.yaml", MODEL.replace("{zipf: {alpha: 1.05}}", "{file: s.npz}", 1))
    return words


@cache
def first_of(words: Callable[[], Words], *outputs: str) -> dict[str, bytes]:
    """Files that a command makes, by name; it runs once, in a folder of its own."""
    with (
        TemporaryDirectory() as place,
        contextlib.chdir(place),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        assert main([*words(), "--quiet"]) == 0
        return {name: Path(name).read_bytes() for name in outputs}


def report_rounds(_: Any, __: int, job: Job, *, on_report: OnReport, **___: Any) -> None:
    """Report rounds as ranks of a bench run would, without any rank."""
    names, ranks = list(job.plans), job.world_size
    settled = {"rounds": 1, "settled": True, "ms": {name: [[1.0] * 6] for name in names}}
    on_report(0, {"kind": "warmup", **settled})
    for index in range(job.first_round, job.rounds):
        times = {
            "lead_ms": {name: [9.0] * ranks for name in names},
            "ranks_ms": {name: [[1.0 + index] * job.block] * ranks for name in names},
            "reference_ms": {kernel: [[0.1, 0.2]] * ranks for kernel in REFERENCE_KERNELS},
        }
        at = {"round": index, "at": "2026-01-01T00:00:00+00:00", "load": 0.5, "other_cores": 0.0}
        on_report(0, {"kind": "round", **at, "order": names, **times})


def _bench_words() -> Words:
    plan = plan_document()
    plan["tables"]["users"]["compute_kernel"] = "fused"
    words = ["bench", "run", put("model.yaml", MODEL), put("plan.json", plan)]
    return [*words, "-o", "rows.json", "--rounds", "3", "--hardware", "cpu-gloo"]


def rows(rng: random.Random) -> Words:
    """Rows of a bench run that a second one continues; no rank is started."""
    bench_run.run_ranks = report_rounds
    document = json.loads(first_of(_bench_words, "rows.json")["rows.json"])
    del document["rounds"][rng.randrange(4) :]
    text = json.dumps(mutate(rng, document, most=1))
    put("rows.json", damage(rng, text.encode(), len(text)) if rng.random() < 0.2 else text)
    return [*_bench_words(), *json_or_not(rng)]


@cache
def _profile() -> dict[str, Any]:
    """A profile over a shipped one."""
    groups = load_hardware("h100-sxm").model_dump(mode="json")
    collectives = {"inter": groups["collectives"]["inter"]}
    head = {"schema": 1, "base": "h100-sxm", "name": "mine", "hbm_gib": 70}
    return {**head, "gemm": groups["gemm"], "collectives": collectives}


def profiles(rng: random.Random) -> Words:
    """Profiles over a shipped one, as calibration writes them, and damaged bytes of them."""
    text = yaml.safe_dump(_profile(), sort_keys=False).encode()
    damaged = rng.random() < 0.3
    overlay = put(
        "mine.yaml", damage(rng, text, len(text)) if damaged else mutate(rng, _profile(), most=1)
    )
    if rng.random() < 0.2:
        return ["hardware", overlay]
    return ["predict", *model_and_plan(), "--hardware", overlay]


def _tune_words(storage: str) -> Words:
    words = ["plan", put("model.yaml", MODEL), "--gpus", "2", "--effort", "0.002"]
    return [*words, "--tune", "batch_size=8192", "--trials", "1", "--storage", storage]


def _journal_words() -> Words:
    return _tune_words("t.journal")


def _database_words() -> Words:
    return _tune_words("sqlite:///t.db")


def storages(rng: random.Random) -> Words:
    """Journals and databases of a study that is continued."""
    if rng.random() < 0.5:
        content = first_of(_database_words, "t.db")["t.db"]
        put("t.db", damage(rng, content, len(content)))
        return _database_words()
    content = first_of(_journal_words, "t.journal")["t.journal"]
    if rng.random() < 0.3:
        put("t.journal", damage(rng, content, len(content)))
    else:
        lines = mutate(rng, [json.loads(line) for line in content.splitlines()])
        lines = lines if isinstance(lines, list) else [lines]
        put("t.journal", "".join(json.dumps(line) + "\n" for line in lines))
    return _journal_words()


def _learn_words() -> Words:
    job.write(Path(), job.plan(), [job.trace(0), job.trace(1)])
    words = ["learn", "traces", "--model", put("model.yaml", job.MODEL), "--plan", "plan.json"]
    return [*words, "-o", "learned.yaml"]


def learned(rng: random.Random) -> Words:
    """Draw a job's learning, with fields of any kind; its traces, model and plan."""
    words = _learn_words()
    kind = rng.randrange(3)
    if kind == 0:
        pair = [mutate(rng, job.trace(rank)) for rank in (0, 1)]
        job.write(Path(), job.plan() if rng.random() < 0.7 else mutate(rng, job.plan()), pair)
        return [*words, *json_or_not(rng)]
    document = yaml.safe_load(first_of(_learn_words, "learned.yaml")["learned.yaml"])
    document["learned"] = mutate(rng, document["learned"])
    over = ["--hardware", put("overlay.yaml", document)]
    return [*words, *over] if kind == 1 else ["predict", "model.yaml", "plan.json", *over]


def _confirm_rounds(_: Any, __: int, job: Job, *rest: Any, on_report: OnReport, **___: Any) -> None:
    """Report rounds as ranks that confirm plans would, without any rank."""
    for name in job.plans:
        on_report(0, {"kind": "plan", "name": name})
    for index in range(10):
        on_report(
            0, {"kind": "round", "key": (rest[2], index), "ms": dict.fromkeys(job.plans, 9.0)}
        )


def confirms(rng: random.Random) -> Words:
    """Plans that are measured: numbers as nobody means them, and models of any kind."""
    bench_confirm.run_ranks = _confirm_rounds
    document = yaml.safe_load(job.MODEL)
    model = put("model.yaml", document if rng.random() < 0.5 else mutate(rng, document, most=1))
    count, minutes = (str(rng.choice((*NUMBERS, "", "x", 2, 3, 4))) for _ in range(2))
    if rng.random() < 0.5:
        count, minutes = "2", "0.1"
    words = ["plan", model, "--gpus", "2", "--hardware", "cpu-gloo", "--effort", "0.002"]
    words += [f"--confirm={count}", f"--minutes={minutes}", "-o", "plan.json"]
    return [*words, *json_or_not(rng)]


OF_ALL = (
    plan_fields, models, names, traces, npy, npz, rows, profiles, storages, learned, confirms,
)  # fmt: skip
FAMILIES: dict[str, Family] = {family.__name__: family for family in OF_ALL}


CALLS = re.compile(r"\w+|ops\.collective|work\.append|work\[\d+\]\.wait")


def check_programs(folder: Path) -> None:
    """Check that generated programs call ops and their own names, and nothing else."""
    for path in folder.glob("benchmark*.py"):
        tree = ast.parse(path.read_text())
        own = {ast.unparse(s.targets[0]) for s in tree.body if isinstance(s, ast.Assign)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert CALLS.fullmatch(called), called
                assert not called.isidentifier() or called in {*own, "Ops", "main", "float"}, called


def check_json(command: str, text: str) -> None:
    """One object that every language reads, whose parts of a step sum to the step."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    document = json.loads(text, parse_constant=refuse)
    assert isinstance(document, dict)
    for step in document["steps"] if command == "trace" else ():
        parts, total = sum(step["breakdown"].values()), step["measured_ms"]
        assert math.isclose(parts, total, rel_tol=1e-6, abs_tol=1e-6), step


def attempt(family: Family, seed: int, folder: Path) -> tuple[int | None, str]:
    """Exit code of one command, and what was wrong with how it ended."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with contextlib.chdir(folder):
        words = family(random.Random(seed))
        signal.alarm(HANG_S)
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main(words)
            if words[:2] == ["bench", "generate"] and code == 0:
                check_programs(Path("benchmark"))
            if "--json" in words and code == 0:
                out.flush()
                check_json(words[0], out.buffer.getvalue().decode())  # type: ignore[attr-defined]
        except BaseException:
            return None, f"{words[0]}: {traceback.format_exc()}"
        finally:
            signal.alarm(0)
    for stream in (out, err):
        stream.flush()
    shown = b"".join(stream.buffer.getvalue() for stream in (out, err))  # type: ignore[attr-defined]
    right = code in ALLOWED and b"Traceback" not in shown and b"\x1b" not in shown
    return code, "" if right else f"{words[0]}: {code}: {shown[-3000:].decode(errors='replace')}"


def _hangs(*_: object) -> None:
    raise TimeoutError(f"no end after {HANG_S} s")


def run(name: str, first: int, count: int, folder: Path) -> dict[str, Any]:
    """Many inputs of a family."""
    codes: Counter[str] = Counter()
    wrong = []
    signal.signal(signal.SIGALRM, _hangs)
    for seed in range(first, first + count):
        code, problem = attempt(FAMILIES[name], seed, folder)
        codes[str(code)] += 1
        if problem:
            wrong.append({"seed": seed, "problem": problem})
    return {"wrong": wrong, "codes": codes, "most_bytes": _most_bytes()}


def _most_bytes() -> int:
    """Most memory of this program; getrusage counts what started it as well."""
    (line,) = (s for s in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in s)
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    place, family, first, count = sys.argv[1:]
    print(json.dumps(run(family, int(first), int(count), Path(place))))
