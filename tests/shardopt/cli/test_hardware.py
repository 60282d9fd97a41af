"""`shardopt cluster`: what it writes is a cluster file."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardopt.config.cluster import load_cluster

TOPOLOGY = """\tGPU0\tGPU1\tNIC0\tCPU Affinity
GPU0\t X \tNV4\tPXB\t0-7
GPU1\tNV4\t X \tPXB\t0-7
NIC0\tPXB\tPXB\t X

GPU 0: NVIDIA A100-SXM4-80GB (UUID: GPU-a)
GPU 1: NVIDIA A100-SXM4-80GB (UUID: GPU-b)
"""


@pytest.fixture
def topology(tmp_path: Path) -> Path:
    path = tmp_path / "topo.txt"
    path.write_text(TOPOLOGY)
    return path


def test_the_file_is_a_cluster_file(run, topology: Path, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("node[1-2] slots=1\n")
    done = run("cluster", "--from-nvidia-smi", topology, "--hosts", "hosts", "-o", "c.yaml")
    assert (done.code, done.out) == (0, "")
    assert "wrote c.yaml" in done.err
    cluster = load_cluster(tmp_path / "c.yaml")
    assert (cluster.hosts, cluster.ranks_per_host, cluster.nvlink_domain) == (2, 1, 1)
    assert cluster.hardware == "a100-80gb"


def test_it_is_printed_where_no_file_is_named(run, topology: Path) -> None:
    done = run("cluster", "--from-nvidia-smi", topology, "--hardware", "h100-sxm", "--quiet")
    assert done.out.splitlines() == [
        "schema: 1",
        "hosts: 1",
        "ranks_per_host: 2",
        "nvlink_domain: 2",
        "nics_per_host: 1",
        "hardware: h100-sxm",
    ]
    assert done.err == ""
