"""Cuts the excerpts in ``tests/data/public`` out of the full tables.

``python -m tests.data.excerpt --data DIR`` writes them anew; ``README.md`` beside this file says
where the figures come from. An excerpt keeps the columns that the code reads and the rows that a
claim needs: those behind the curves, constants and stated errors of the shipped profiles in full,
of the large tables every few rows.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lab.runtimes.megatron import load_megatron
from lab.suites import COLUMNS
from lab.validate import (
    dlrm_published,
    gemm,
    hstu_step,
    links,
    primus_step,
    torchrec_steps,
    transformers,
)
from predictor.csv_rows import read_table
from tests.public_data import EXCERPTS, FULL

Row = dict[str, str]
NCCL_COLUMNS = (
    "source gpu nodes n_gpus network collective size_bytes time_us_out_of_place time_us_in_place "
    "note"
)
SIMAI_FILE = "simai_alltoall_efficiency.csv"
SIMAI_HOSTS = {
    "2Node-16GPU(NIC )": 2,
    "4Node-32GPU(NIC)": 4,
    "8Node-64GPU(NIC)": 8,
    "16Node-128GPU(NIC)": 16,
}
"""Column -> hosts of eight."""
XLA_COLUMNS = "gpu collective dtype ranks concurrent_groups size_bytes time_us method date"
MLPERF_COLUMNS = (
    "round org system benchmark nodes accel_per_node accels accelerator accel_interconnect cpu "
    "global_batch iter_ms_median"
)
CONFIG_COLUMNS = (
    "round org config global_batch nodes gpus_per_node sharding_plan mem_comm_bw_ratio "
    "dp_sharding_threshold_gb"
)
MATMUL_COLUMNS = "gpu b m n k lhs rhs out time_us date flag"


def where(**allowed: Sequence[str]) -> Callable[[list[Row]], list[Row]]:
    """Rows whose columns have one of some values."""
    return lambda rows: [
        row for row in rows if all(row[name] in values for name, values in allowed.items())
    ]


def predicted(rows: list[Row]) -> list[Row]:
    """Collectives of GPUs with a profile, among two ranks or more."""
    of_gpus = where(gpu=("H100", "B200", "GB200"))(rows)
    return [row for row in of_gpus if row["collective"] != "permute" and row["ranks"] != "1"]


def gpus_of_one_host(rows: list[Row]) -> list[Row]:
    """Two DGX kinds, within a host."""
    of_kinds = where(platform=("a100_dgx", "h100_dgx"))(rows)
    return [row for row in of_kinds if row["num_workers"] == row["devices_per_node"]]


def some_shapes(rows: list[Row]) -> list[Row]:
    """Every few products of each device and split, and the smallest and largest of each side."""
    kept: list[Row] = []
    for device, split in dict.fromkeys((row["device"], row["split"]) for row in rows):
        own = where(device=(device,), split=(split,))(rows)
        chosen = own[:: 4 if split == "test" else 40]
        sides: list[Callable[[Row], float]] = [
            lambda row: float(row["B"]) * float(row["M"]),
            lambda row: float(row["N"]),
            lambda row: float(row["K"]),
        ]
        chosen += [pick(own, key=side) for side in sides for pick in (min, max)]
        kept += [row for row in own if any(row is row_chosen for row_chosen in chosen)]
    return kept


def fitted_and_some(rows: list[Row]) -> list[Row]:
    """The rows that the constants were fitted on, and every few others."""
    shipped = {tuple(map(float, configuration)) for configuration in load_megatron().rows}
    columns = [column for column in rows[0] if column != COLUMNS[transformers.SINGLE_FILE][-1]]
    fit = [row for row in rows if tuple(float(row[name]) for name in columns) in shipped]
    return fit + [row for row in rows if row not in fit][::4]


@dataclass(frozen=True)
class Excerpt:
    """What is kept of a table: ``columns`` (all if empty) of the rows that ``rows`` picks."""

    columns: str = ""
    rows: Callable[[list[Row]], list[Row]] = list


TABLES = {
    links.NCCL_FILE: Excerpt(NCCL_COLUMNS),
    links.NCCL_EXTRA_FILE: Excerpt(NCCL_COLUMNS),
    links.MULTIHOST_FILE: Excerpt(NCCL_COLUMNS),
    links.NCCL_TESTS_FILE: Excerpt("system gpu nccl ranks collective size_bytes time_us"),
    links.XLA_FILE: Excerpt(XLA_COLUMNS, predicted),
    gemm.BF16_FILE: Excerpt("gpu m n k time_us", lambda rows: rows[::12]),
    links.VIDUR_FILE: Excerpt(
        "platform collective num_workers devices_per_node size us_min", gpus_of_one_host
    ),
    links.VTRAIN_FILE: Excerpt("gpu n_gpus size_bytes time_us_out_of_place"),
    gemm.GEMM_FILE: Excerpt("split device B M N K latency_ms", some_shapes),
    # every few, as of the fp32 test rows, so that errors over both count them alike
    gemm.MATMUL_FILE: Excerpt(MATMUL_COLUMNS, lambda rows: where(gpu=("H100", "B200"))(rows)[::4]),
    SIMAI_FILE: Excerpt("|".join(("Size", *SIMAI_HOSTS))),
    "trace_param_dlrm8xV100_collectives.csv": Excerpt("et_collective idx kernel_dur_us in_bytes"),
    "mlperf_dlrm_measured_iteration_time.csv": Excerpt(MLPERF_COLUMNS),
    "mlperf_dlrm_dcnv2_configs.csv": Excerpt(CONFIG_COLUMNS),
    "torchrec_dlrm_p4d_measured.csv": Excerpt(),
    dlrm_published.FILE: Excerpt(" ".join(COLUMNS[dlrm_published.FILE])),
    hstu_step.FILE: Excerpt(" ".join(COLUMNS[hstu_step.FILE])),
    primus_step.FILE: Excerpt(" ".join(COLUMNS[primus_step.FILE])),
    # steps of more than one loop, for which no plan was printed
    torchrec_steps.FILE: Excerpt(
        rows=lambda rows: [row for row in rows if row["num_benchmarks"] not in ("", "1")]
    ),
    torchrec_steps.STATS_FILE: Excerpt(
        " ".join(COLUMNS[torchrec_steps.STATS_FILE]), rows=lambda _: []
    ),
    transformers.SINGLE_FILE: Excerpt(rows=fitted_and_some),
    transformers.MULTI_FILE: Excerpt(rows=lambda rows: rows[::2]),
}
PLANS = "mlperf_dlrm_dcnv2_plans.json"


def cut(source: Path, excerpt: Excerpt) -> str:
    """The text of an excerpt: the comments of the table, its header, the rows kept."""
    lines = source.read_text(encoding="utf-8").splitlines()
    comments = [line for line in lines if line.startswith("#")]
    rows: list[Row] = read_table(source, (), dict).rows
    given = excerpt.columns
    columns = given.split("|" if "|" in given else None) or list(rows[0])
    out = io.StringIO()
    out.writelines(f"{line}\n" for line in comments)
    writer = csv.DictWriter(out, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(excerpt.rows(rows))
    return out.getvalue().replace("\ufeff", "")


def excerpts(folder: Path) -> dict[str, str]:
    """Name of every excerpt -> its text, out of the full tables in ``folder``."""
    tables = {name: cut(folder / name, excerpt) for name, excerpt in TABLES.items()}
    plans = json.loads((folder / PLANS).read_text(encoding="utf-8"))
    tables[PLANS] = json.dumps(plans, separators=(",", ":")) + "\n"
    return tables


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.data.excerpt")
    parser.add_argument("--data", type=Path, default=FULL, help="folder of the full tables")
    for name, text in excerpts(parser.parse_args(argv).data).items():
        (EXCERPTS / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
