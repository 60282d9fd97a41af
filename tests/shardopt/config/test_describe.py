"""Lists of hosts as Slurm, MPI and DeepSpeed give them, and matrices as nvidia-smi prints them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from predictor.cost.collectives import Collectives
from predictor.errors import InputError
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.model.topology import NetworkLevel, Topology
from predictor.units import GIB, MIB
from shardopt.config.cluster import load_cluster
from shardopt.config.describe import (
    HostTopology,
    describe,
    hosts_of,
    read_host,
    read_hosts,
)
from tests.quick import quick_first


def read(folder: Path, text: str) -> list[tuple[str, int | None]]:
    path = folder / "hosts"
    path.write_text(text)
    return read_hosts(path)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a\n\n# b\nc # last\n", [("a", None), ("c", None)]),
        ("n[01-03,07]", [(f"n{i}", None) for i in ("01", "02", "03", "07")]),
        ("a[1-2]-ib,b9", [("a1-ib", None), ("a2-ib", None), ("b9", None)]),
        ("a slots=8\nb slots = 4 max_slots=9\n", [("a", 8), ("b", 4)]),
        ("a:2\nb:2", [("a", 2), ("b", 2)]),
        ("n[8-11]:4", [(f"n{i}", 4) for i in range(8, 12)]),
    ],
)
def test_hosts(text: str, hosts: list[tuple[str, int | None]], tmp_path: Path) -> None:
    assert read(tmp_path, text) == hosts


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no host"),
        ("a\nb c\n", "hosts:2: got 'b c'"),
        ("n[3-1]", "hosts:1: got '3-1'"),
        ("n[-1]", "'-1'"),
        ("n[0-999999999]", "more than 65536"),
        ("n[0-9999999999]", "'0-9999999999'"),
        ("n[a]", "hosts:1: got"),
        ("a,,b", "hosts:1: got"),
        ("a,", "hosts:1: got"),
        ("a\na", "hosts:2: host 'a' appears twice"),
        ("n[1-70000]", "more than 65536"),
    ],
)
def test_what_cannot_be_read_is_told(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, text)
    assert words in str(caught.value)


@given(st.text(alphabet="ab[]-,019 :=slot#\n", max_size=60))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    try:
        tables = read(tmp_path_factory.mktemp("any"), text)
    except InputError:
        return
    assert tables
    assert len({name for name, _ in tables}) == len(tables)


@pytest.mark.parametrize(
    "text",
    quick_first(
        2,
        [
            ",".join(f"a{i}[0-65535]" for i in range(50)),
            "n[0," * 5_000,
            f"n[{','.join(map(str, range(66_000)))}]",
        ],
    ),
)
def test_a_short_list_names_no_more_than_memory_holds(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardopt.config.describe.read_bytes", lambda path, what: text.encode())
    tracemalloc.start()
    try:
        with pytest.raises(InputError):
            read_hosts("hosts")
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", ["0", "65537", "9" * 5000])
def test_a_number_of_hosts_is_bounded(text: str) -> None:
    with pytest.raises(InputError):
        hosts_of(text)


def test_hosts_as_a_scheduler_prints_them() -> None:
    assert hosts_of("gpu[01-08]") == [(f"gpu{i:02d}", None) for i in range(1, 9)]
    assert hosts_of("a,b") == [("a", None), ("b", None)]
    with pytest.raises(InputError, match="hosts:1: got '3-1'"):
        hosts_of("gpu[3-1]")


Link = Callable[[int, int], str]


def matrix(gpus: int, link: Link, nics: int = 0) -> str:
    """The output for some GPUs; its head is underlined, as on a terminal."""
    names = [f"GPU{i}" for i in range(gpus)] + [f"NIC{i}" for i in range(nics)]
    lines = ["\t\x1b[4m" + "\t".join([*names, "CPU Affinity", "NUMA Affinity"]) + "\x1b[0m"]
    for i in range(gpus):
        cells = [" X " if i == j else link(i, j) for j in range(gpus)] + ["PXB"] * nics
        lines.append("\t".join([f"GPU{i}", *cells, "0-47", "0"]))
    return "\n".join([*lines, "", "Legend:", "  NV#  = a bonded set of # NVLinks"]) + "\n"


def read_matrix(folder: Path, text: str) -> HostTopology:
    path = folder / "topo.txt"
    path.write_text(text)
    return read_host(path)


@pytest.mark.parametrize("domain", [1, 2, 4, 8])
def test_groups_that_nvlink_joins(domain: int, tmp_path: Path) -> None:
    text = matrix(8, lambda i, j: "NV12" if i // domain == j // domain else "SYS", nics=3)
    assert read_matrix(tmp_path, text) == HostTopology(8, domain, 3, None)


def test_cards_are_counted_into_the_file(tmp_path: Path) -> None:
    """2 for 8 GPUs are a quarter of the bandwidth between hosts."""
    keys, notes = describe(HostTopology(8, 8, 2, None), hosts_of("gpu[1-2]"), "h100-sxm")
    assert any("2 network cards for 8 GPUs" in note for note in notes)
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(keys))
    profile = load_hardware("h100-sxm")
    size, own = np.float64(256 * MIB), profile.collectives.inter.nic_gbit_s

    def all_to_all_ms(hardware: HardwareProfile, network: tuple[NetworkLevel, ...]) -> float:
        topology = Topology.uniform(16, 8, hbm_bytes=GIB, ddr_bytes=GIB)
        return float(Collectives(hardware, replace(topology, network=network)).all_to_all(size))

    shared = all_to_all_ms(profile, load_cluster(path).network)
    assert shared == pytest.approx(all_to_all_ms(profile.with_nic(own / 4), ()))
    path.write_text(yaml.safe_dump({**keys, "nics_per_host": 8}))
    assert load_cluster(path).network == ()


def test_one_gpu_and_its_name(tmp_path: Path) -> None:
    text = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1f)\n" + matrix(1, lambda i, j: "")
    assert read_matrix(tmp_path, text) == HostTopology(1, 1, 0, "NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "GPU0"),
        ("\tGPU0\tGPU1\nGPU0\t X \tNV1\n", "topo.txt:3"),
        ("\tGPU0\tGPU1\nGPU0\t X \n", "topo.txt:2"),
        ("\tGPU0\tGPU0\nGPU0\t X \tNV1\n", "topo.txt:1: got 2 GPUs"),
        (matrix(4, lambda i, j: "NV1" if abs(i - j) == 1 else "SYS"), "nvlink_domain"),
        (
            matrix(3, lambda i, j: "NV1" if i < 2 and j < 2 else "SYS"),
            "1, 2 GPUs",
        ),
        ("GPU 0: A\nGPU 1: B\n" + matrix(2, lambda i, j: "NV1"), "2 kinds (A, B)"),
    ],
)
def test_what_is_no_matrix_is_told(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read_matrix(tmp_path, text)
    assert words in str(caught.value)


@given(st.text(alphabet="GPU0123 XNV\t\n:[]\x1b", max_size=200))
def test_any_matrix_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    try:
        topology = read_matrix(tmp_path_factory.mktemp("any"), text)
    except InputError:
        return
    assert topology.gpus % topology.nvlink_domain == 0
