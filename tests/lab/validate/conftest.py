"""A batch of two tasks on a machine that does not exist."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from predictor.cost.collectives import OPS
from predictor.model.plan import ShardingPlan, ShardingType
from predictor.model.plan_json import plan_to_dict
from shardopt.bench.rows import BenchRows, write_rows
from shardopt.calibrate.points import REFERENCE_KERNELS as KERNELS
from shardopt.calibrate.points import Point
from shardopt.calibrate.rows import CalibrationRows, Origin, row_of_samples
from shardopt.measure.sampling import Samples
from tests.builders import a_table, cut, data_parallel, table_wise
from tests.lab.validate.reports import a_round

ENVIRONMENT: dict[str, Any] = {
    "system": "Linux",
    "machine": "x86_64",
    "processor": "Made-up CPU",
    "cores": 2,
    "memory_bytes": 24 * 2**30,
    "torch": "2.13.0",
    "fbgemm-gpu-cpu": "1.8.0",
    "torchrec": "1.8.0",
}
ORIGIN = Origin("Made-up CPU, 2 cores, 24 GiB, Linux", "torch 2.13.0, fbgemm 1.8.0")
REFERENCE_MS = dict(zip(KERNELS, (1.0, 2.0, 3.0, 4.0), strict=True))
CALIBRATED_AT = "2026-01-01T00:00:00Z"
MEASURED_AT = "2026-01-01T00:45:00+00:00"
ROUNDS = (0.95, 1.05, 0.95, 1.05)
"""Even rounds are faster than odd ones; the median over all is 1."""
MODEL = """\
schema: 1
name: two_tables
batch_size: 256
train_pipeline: {pipeline}
tables:
  - name: a
    num_embeddings: 1000
    embedding_dim: 32
    features: [{{name: fa, pooling_factor: 2, index_distribution: {{zipf: {{alpha: 1.05}}}}}}]
  - name: b
    num_embeddings: 200000
    embedding_dim: 32
    features: [{{name: fb, pooling_factor: 20, index_distribution: {{zipf: {{alpha: 1.05}}}}}}]
dense:
  in_features: 13
  bottom_mlp: [32]
  interaction: concat
  top_mlp: [32, 1]
"""


A, B = a_table("a", 1000, 32), a_table("b", 200_000, 32)
RW = ShardingType.ROW_WISE
PLANS = {
    name: ShardingPlan(dict(zip("ab", tables, strict=True)), 2, 2)
    for name, tables in {
        "table_wise_by_lookups": (table_wise(A, 0), table_wise(B, 1)),
        "row_wise": (cut(A, RW, [0, 1]), cut(B, RW, [0, 1])),
        "mixed": (cut(A, RW, [0, 1]), table_wise(B, 1)),
        "replicated": (data_parallel(A, 2), table_wise(B, 1)),
    }.items()
}


def bench_rows(
    pipeline: str, times_ms: Sequence[float], slower: float, block: int = 2
) -> BenchRows:
    """Four rounds; ``slower`` is how much slower the reference kernels run than calibrated."""
    times = dict(zip(PLANS, times_ms, strict=True))
    rounds = [
        a_round(
            index,
            {name: [[time * scale] * block] * 2 for name, time in times.items()},
            reference_ms={k: [[ms * slower] * 4] * 2 for k, ms in REFERENCE_MS.items()},
        )
        for index, scale in enumerate(ROUNDS)
    ]
    session = {
        "environment": {**ENVIRONMENT, "kernel": "6.1"},
        "started": MEASURED_AT,
        "load": 0.0,
        "warmup": {"rounds": 1, "settled": True},
    }
    return BenchRows(
        model={"name": "two_tables", "sha256": "", "batch_size": 256, "train_pipeline": pipeline},
        settings={"world_size": 2, "block": block},
        plans=[{"name": name, "plan": plan_to_dict(plan)} for name, plan in PLANS.items()],
        sessions=[session],
        rounds=rounds,
    )


def write_calibration(path: Path, origin: Origin = ORIGIN, **link: float) -> None:
    """Collectives at 1 ms a MiB, and the reference kernels."""
    file = CalibrationRows(path, origin)
    among = {"ranks": 2, **link}

    def add(point: Point, ms: float) -> None:
        row = row_of_samples(point, Samples((ms * 1e-3,) * 3))
        file.append(dataclasses.replace(row, date=CALIBRATED_AT))

    for op in OPS:
        for octave in range(10, 24):
            point = Point("collective", {"op": op, "bytes": 2**octave, **among}, octave % 2 == 1)
            add(point, 0.2 + 2.0 ** (octave - 20))
    for at in ("start", "middle", "end"):
        for kernel, ms in REFERENCE_MS.items():
            add(Point("reference", {"at": at, "kernel": kernel, **among}), ms)


@dataclasses.dataclass
class Lab:
    """Writes the files of a batch."""

    root: Path
    name: str = "batch-1"

    @property
    def folder(self) -> Path:
        return self.root / self.name

    def about(self, **changes: Any) -> None:
        self.folder.mkdir(exist_ok=True)
        about = {
            "schema": "shardopt.lab-batch/1",
            "topology": "loopback",
            "link_gbit_s": None,
            "world_size": 2,
            "local_world_size": 2,
            "environment": ENVIRONMENT,
            "started": CALIBRATED_AT,
            "tasks": [1, 2],
        }
        (self.folder / "batch.json").write_text(json.dumps({**about, **changes}))

    def task(self, number: int, pipeline: str, times: Sequence[float], slower: float = 1.0) -> None:
        stem = f"task-{number:03d}"
        (self.folder / f"{stem}.yaml").write_text(MODEL.format(pipeline=pipeline))
        write_rows(self.folder / f"{stem}.rows.json", bench_rows(pipeline, times, slower))

    def again(self, number: int, pipeline: str, times: Sequence[float]) -> None:
        path = self.folder / f"task-{number:03d}.again.rows.json"
        write_rows(path, bench_rows(pipeline, times, 1.0))

    def calibration(self, origin: Origin = ORIGIN, **link: float) -> None:
        path = self.folder / "calibration.rows.csv"
        path.unlink(missing_ok=True)
        write_calibration(path, origin, **link)


def a_lab(root: Path) -> Lab:
    """A batch of two tasks whose plans all took 1 ms."""
    new_lab = Lab(root)
    new_lab.about()
    new_lab.calibration()
    new_lab.task(1, "base", [1.0] * len(PLANS))
    new_lab.task(2, "sparse_dist", [1.0] * len(PLANS))
    return new_lab


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    """One that a test may change."""
    return a_lab(tmp_path)


@pytest.fixture(scope="module")
def kept_lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """One whose files tests of a module share."""
    return a_lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="session")
def times_of() -> Callable[[Any], dict[int, np.ndarray]]:
    """Predicted ms by task number, in the order of `PLANS`, from a report."""

    def found(report: Any) -> dict[int, np.ndarray]:
        numbers = dict.fromkeys(row.name["task"] for row in report.rows)
        return {
            number: np.array([r.predicted_ms for r in report.rows if r.name["task"] == number])
            for number in numbers
        }

    return found
