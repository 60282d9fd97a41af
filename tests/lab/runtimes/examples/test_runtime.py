"""What the software of NVIDIA's DeepLearningExamples did by date."""

from __future__ import annotations

from datetime import date

from lab.runtimes.examples import load_examples
from predictor.cost.collectives import Collectives
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.model.topology import Topology
from predictor.units import gb_per_s

OLD, NEW = date(2020, 7, 4), date(2021, 6, 10)
SIZE = 2.0**30


def all_to_all_ms(hardware: HardwareProfile) -> float:
    top = Topology.uniform(8, 8, hbm_bytes=1, ddr_bytes=1)
    return float(Collectives(hardware, top).all_to_all(SIZE))


def test_graphs_take_the_host_out() -> None:
    hardware = load_hardware("a100-80gb")
    runtime = load_examples()
    fused = runtime.profile(hardware, NEW).overheads
    assert (fused.op_us, fused.iteration_us, fused.collective_us) == (0, 0, 0)
    assert fused.launch_us == runtime.graph_node_us
    plain = runtime.profile(hardware, OLD).overheads
    assert plain.op_us == plain.layer_op_us == hardware.overheads.layer_op_us
    assert (plain.iteration_us, plain.launch_us) == (0, hardware.overheads.launch_us)


def test_on_an_old_mesh_three_eighths_of_a_buffer_cross_the_sockets() -> None:
    """Four cards a socket send an eighth to each of three others that no NVLink joins to them."""
    hardware, runtime = load_hardware("v100-32gb"), load_examples()
    found = all_to_all_ms(runtime.profile(hardware, OLD, through_host=True))
    least = 4 * 3 / 8 * SIZE / gb_per_s(runtime.socket_link_gb_s)
    assert least < found < 1.01 * least
    assert runtime.crosses_sockets(8, OLD)
    assert not runtime.crosses_sockets(8, NEW)
    assert not runtime.crosses_sockets(4, OLD)


def test_tensorflow_left_the_first_gpu_in_2022() -> None:
    runtime = load_examples()
    assert runtime.on_first_gpu("tensorflow", NEW)
    assert not runtime.on_first_gpu("tensorflow", date(2022, 7, 11))
    assert runtime.on_first_gpu("pytorch", date(2022, 7, 11))
    assert not runtime.on_first_gpu("jax", NEW)
