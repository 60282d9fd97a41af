"""Matrices as nvidia-smi prints them, and those that it does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predictor.errors import InputError
from shardopt.config.clusters.nvidia_smi import HostTopology, read_host

Link = Callable[[int, int], str]


def matrix(gpus: int, link: Link, nics: int = 0) -> str:
    """The output for some GPUs; its head is underlined, as on a terminal."""
    names = [f"GPU{i}" for i in range(gpus)] + [f"NIC{i}" for i in range(nics)]
    lines = ["\t\x1b[4m" + "\t".join([*names, "CPU Affinity", "NUMA Affinity"]) + "\x1b[0m"]
    for i in range(gpus):
        cells = [" X " if i == j else link(i, j) for j in range(gpus)] + ["PXB"] * nics
        lines.append("\t".join([f"GPU{i}", *cells, "0-47", "0"]))
    return "\n".join([*lines, "", "Legend:", "  NV#  = a bonded set of # NVLinks"]) + "\n"


def read(folder: Path, text: str) -> HostTopology:
    path = folder / "topo.txt"
    path.write_text(text)
    return read_host(path)


@pytest.mark.parametrize("domain", [1, 2, 4, 8])
def test_groups_that_nvlink_joins(domain: int, tmp_path: Path) -> None:
    text = matrix(8, lambda i, j: "NV12" if i // domain == j // domain else "SYS", nics=3)
    assert read(tmp_path, text) == HostTopology(8, domain, 3, None)


def test_one_gpu_and_its_name(tmp_path: Path) -> None:
    text = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1f)\n" + matrix(1, lambda i, j: "")
    assert read(tmp_path, text) == HostTopology(1, 1, 0, "NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no line that starts with GPU0"),
        ("\tGPU0\tGPU1\nGPU0\t X \tNV1\n", "topo.txt:3: got the end of the file; here the row"),
        ("\tGPU0\tGPU1\nGPU0\t X \n", "topo.txt:2: got 'GPU0"),
        ("\tGPU0\tGPU0\nGPU0\t X \tNV1\n", "topo.txt:1: got 2 GPUs, or one twice"),
        (matrix(4, lambda i, j: "NV1" if abs(i - j) == 1 else "SYS"), "does not all join to each"),
        (
            matrix(3, lambda i, j: "NV1" if i < 2 and j < 2 else "SYS"),
            "NVLink joins groups of 1, 2 GPUs",
        ),
        ("GPU 0: A\nGPU 1: B\n" + matrix(2, lambda i, j: "NV1"), "names GPUs of 2 kinds (A, B)"),
    ],
)
def test_what_cannot_be_read_is_told(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, text)
    assert words in str(caught.value)


@given(st.text(alphabet="GPU0123 XNV\t\n:[]\x1b", max_size=200))
def test_any_text_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    try:
        found = read(tmp_path_factory.mktemp("any"), text)
    except InputError:
        return
    assert found.gpus % found.nvlink_domain == 0
