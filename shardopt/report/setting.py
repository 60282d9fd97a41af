"""Model, machine and batch, as every report begins."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from predictor.model.topology import Topology
from predictor.model.workload import DenseArch, MeasuredDense, Workload
from shardopt.api.setting import Setting
from shardopt.formatting import (
    gib_number,
    plural,
)


def show_setting(console: Console, setting: Setting) -> None:
    """Model, machine and batch."""
    workload, topology = setting.workload, setting.installed
    lookups = sum(t.lookups_per_sample for t in workload.tables)
    default = " (default)" if setting.hardware_from == "default" else ""
    batch, ranks = workload.batch_size, topology.world_size
    rows = (
        (
            workload.name,
            f"{plural(len(workload.tables), 'table')}, "
            f"{gib_number(workload.embedding_bytes)} GiB of embeddings, "
            f"{lookups:,.4g} ids per sample",
        ),
        (
            f"{setting.hardware.name}{default}",
            f"{plural(ranks, 'GPU')} ({plural(topology.hosts, 'host')} of "
            f"{topology.local_world_size}, NVLink domain of {topology.nvlink_domain}"
            f"{_network_words(topology)}), "
            f"{_memory_words(setting)}",
        ),
        (
            "batch",
            f"{batch:,} per GPU, {batch * ranks:,} in total; {workload.train_pipeline} pipeline",
        ),
        ("dense part", dense_words(workload)),
        *([("replica groups", _copies_words(setting))] if workload.replica_groups else []),
    )
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", overflow="fold", max_width=console.width // 2)
    grid.add_column(overflow="fold")
    for row in rows:
        grid.add_row(*row)
    console.print(grid)


def _network_words(topology: Topology) -> str:
    """Levels of the network that cost something beyond the NICs."""
    found = []
    for level in topology.network:
        facts = []
        if level.oversubscription > 1:
            facts.append(f"{level.oversubscription:g}:1 oversubscribed")
        if level.gbit_s is not None:
            facts.append(f"{level.gbit_s:g} Gbit/s a rank")
        if level.latency_us:
            facts.append(f"+{level.latency_us:g} us")
        if facts:
            found.append(f"{level.name} joins {level.parts} parts, {', '.join(facts)}")
    return "".join(f"; {words}" for words in found)


def _copies_words(setting: Setting) -> str:
    """How ranks form groups, and how often their copies meet."""
    groups, job = setting.workload.replica_groups, setting.installed
    assert groups is not None
    if groups.count(job.world_size) == 1:
        return f"one group of all {job.world_size} ranks, so tables have one copy"
    apart = "in a row" if groups.use_inter_host_allreduce else "with their copies on neighbours"
    averaged = (
        "its weights averaged between forward and backward of every step"
        if groups.fully_sharded
        else f"averaged every {plural(groups.sync_interval, 'step')}"
    )
    return (
        f"{groups.count(job.world_size)} groups of {plural(groups.size, 'rank')} {apart}; each has "
        f"all tables, {averaged}"
    )


def dense_words(workload: Workload) -> str:
    """Which of the three forms says what the dense part is."""
    dense = workload.dense
    if isinstance(dense, DenseArch):
        return "from the layers in the model file"
    if not isinstance(dense, MeasuredDense):
        return "from the ops captured from the module"
    scaled = dense.batch_size != workload.batch_size
    return f"measured at a batch of {dense.batch_size:,}{', scaled in proportion' * scaled}"


def _memory_words(setting: Setting) -> str:
    installed, left = setting.installed, setting.topology
    if any(installed.hbm_cap_bytes):
        return (
            f"{gib_number(min(left.hbm_cap_bytes))} of "
            f"{gib_number(min(installed.hbm_cap_bytes))} GiB HBM for tables"
        )
    return f"{gib_number(min(left.ddr_cap_bytes))} GiB host memory for tables"
