"""The rows of bad_inputs.yaml: one message on stderr, its exit code, and every file as it was."""

from __future__ import annotations

import json
import operator
import shlex
import shutil
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from predictor.document import SAFE_LOADER
from predictor.hardware.loader import load_hardware
from tests.predictor.trace.synthetic import kineto, write
from tests.shardopt.cli.test_hardware import TOPOLOGY
from tests.shardopt.config.conftest import GOOD
from tests.shardopt.config.test_cluster import GOOD as CLUSTER
from tests.shardopt.config.test_cluster import LEVELS
from tests.shardopt.config.test_model import MEASURED, SEQUENCES
from tests.shardopt.config.test_ops_file import MODEL as CAPTURED
from tests.shardopt.config.test_ops_file import OPS
from tests.shardopt.config.test_tables_csv import GOOD as TABLES
from tests.shardopt.config.test_tables_csv import MODEL as WITH_CSV
from tests.shardopt.conftest import MODEL, a_plan

ROWS: list[dict[str, Any]] = yaml.load(
    Path(__file__).with_name("bad_inputs.yaml").read_text(), Loader=SAFE_LOADER
)


@pytest.fixture(scope="session")
def good_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files without problems, which rows damage."""
    folder, plan = tmp_path_factory.mktemp("good"), a_plan()
    old = {f"old_{key}": table for key, table in plan["tables"].items()}
    texts = {
        "model.yaml": MODEL,
        "full.yaml": GOOD,
        "measured.yaml": MEASURED,
        "sequences.yaml": SEQUENCES,
        "csv.yaml": WITH_CSV,
        "tables.csv": TABLES,
        "captured.yaml": CAPTURED,
        "m.ops.json": json.dumps(OPS),
        "cluster.yaml": CLUSTER,
        "levels.yaml": LEVELS,
        "topo.txt": TOPOLOGY,
        "given.json": json.dumps(plan),
        "b200.json": json.dumps({**plan, "hardware": "b200"}),
        "other.json": json.dumps({**plan, "tables": old}),
        "p.yaml": "h100-sxm: 1\nb200: -1\n",
        "rows.yaml": "user: many\n",
        "model.yaml.log": "no journal",
    }
    gemm = load_hardware("h100-sxm").gemm.model_dump(mode="json") | {"tiles": "x"}
    texts["tiles.yaml"] = yaml.safe_dump({"base": "h100-sxm", "gemm": gemm})
    for name, text in texts.items():
        (folder / name).write_text(text)
    write(folder, "rank0.json", kineto(0, world_size=1))
    many, day = np.arange(400).reshape(100, 4) % 300, np.arange(100) % 3
    np.savez(folder / "data.npz", user=many, day=day)
    np.savez(folder / "days.npz", user=many, when=day * 86_400)
    ones = np.ones(2)
    arrays = {"cat_0.counts": ones, "cat_0.weights": ones, "half.counts": ones}
    arrays |= {"odd.counts": ones, "odd.weights": np.ones(3)}
    for name in ("bare", "long"):
        arrays |= {f"{name}.counts": ones, f"{name}.weights": ones}
        arrays[f"{name}.range_rows"] = np.ones((2, 2)) / 2
    arrays |= {"long.range_width": np.array(1), "long.rows": np.array(3)}
    np.savez(folder / "stats.npz", **arrays)
    return folder


def damaged(folder: Path, row: dict[str, Any]) -> None:
    """Change the files that a row names."""
    if "edit" in row:
        name, old, new = row["edit"]
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1), newline="")
    for name, text in row.get("write", {}).items():
        (folder / name).write_text(text)
    if "keys" in row:
        path = folder / ("m.ops.json" if "captured.yaml" in row["run"] else "given.json")
        path.write_text(json.dumps({**json.loads(path.read_text()), **row["keys"]}))

    if "set" in row or "drop" in row:
        path = folder / "given.json"
        document = json.loads(path.read_text())
        for dotted in (row["drop"],) if "drop" in row else row["set"]:
            *parents, last = (int(key) if key.isdigit() else key for key in dotted.split("."))
            inner = reduce(operator.getitem, parents, document)
            if "drop" in row:
                del inner[last]
            else:
                inner[last] = row["set"][dotted]
        path.write_text(json.dumps(document))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["run"])
def test_it_is_told_and_changes_nothing(
    run, good_files: Path, tmp_path: Path, row: dict[str, Any]
) -> None:
    shutil.copytree(good_files, tmp_path, dirs_exist_ok=True)
    damaged(tmp_path, row)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    done = run(*shlex.split(row["run"]))
    assert (done.code, done.out) == (row.get("code", 2), ""), done.err
    assert "shardopt: error: " in done.err
    assert "Traceback" not in done.err
    assert "secret" not in done.err, "a password in an address of a study"
    texts = done.err.splitlines() if "edit" in row and "code" not in row else [done.err]
    assert any(all(part in text for part in row["says"]) for text in texts), done.err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
