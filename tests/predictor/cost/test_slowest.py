"""One profile for devices of several generations."""

from __future__ import annotations

import pytest

from predictor.cost.slowest import slowest
from predictor.errors import InputError
from predictor.hardware.loader import load_hardware

NEW, OLD = load_hardware("h100-sxm"), load_hardware("a100-80gb")


def test_kernels_of_the_slower_memory_and_links_of_the_slower_network() -> None:
    mixed = slowest([NEW, OLD])
    assert mixed.name == "h100-sxm + a100-80gb"
    assert (mixed.embedding, mixed.gemm, mixed.memory) == (OLD.embedding, OLD.gemm, OLD.memory)
    assert mixed.collectives.inter == OLD.collectives.inter
    assert mixed.overheads.op_us == max(NEW.overheads.op_us, OLD.overheads.op_us)
    assert mixed.origins["embedding"] == "a100-80gb"


def test_cpus_and_gpus_do_not_mix() -> None:
    with pytest.raises(InputError, match=r"h100-sxm, cpu-gloo: CPUs and GPUs"):
        slowest([NEW, load_hardware("cpu-gloo")])
