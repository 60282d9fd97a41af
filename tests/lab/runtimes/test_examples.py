"""DLRM's iteration in NVIDIA's DeepLearningExamples."""

from __future__ import annotations

from datetime import date

from lab.runtimes.examples import ExamplesBuilder, load_examples
from predictor.cost.collectives import Collectives
from predictor.hardware.loader import load_hardware
from predictor.hardware.schema import HardwareProfile
from predictor.iteration.graph import Graph
from predictor.iteration.plan_scorer import PlanScorer
from predictor.iteration.timeline import simulate
from predictor.model.workload import DenseArch, Feature, Table
from predictor.units import gb_per_s
from tests.builders import a_topology, a_workload, plan_of, table_wise


def graph(ranks: int, *, first_gpu: bool) -> Graph:
    tables = [Table(f"t{i}", 10**6, 128, (Feature(f"f{i}", 1.0),)) for i in range(4)]
    dense = DenseArch(13, (512, 256, 128), (512, 1))
    workload, top = a_workload(*tables, batch_size=8192, dense=dense), a_topology(ranks)
    plan = plan_of(workload, top, [table_wise(t, i % ranks) for i, t in enumerate(tables)])
    scorer = PlanScorer(workload, top, load_hardware("v100-32gb"))
    return ExamplesBuilder(scorer, plan, first_gpu=first_gpu).build()


def time_ms(graph: Graph) -> float:
    return float(simulate(graph).iteration_ms[0])


def test_one_rank_runs_the_bottom_mlp_of_all_samples() -> None:
    alone, parallel = graph(4, first_gpu=True), graph(4, first_gpu=False)
    rank_ops = [op for op in alone.ops if op.ranks == (0,)]
    first = [op.name.split()[0] for op in alone.ops].index("ebc.TW")
    assert {op.phase for op in rank_ops} == {"dense_forward", "dense_backward"}
    assert all(op.ranks == (0,) for op in alone.ops[1:first])
    assert {op.ranks for op in parallel.ops} == {None}
    dense = [op.cost_ms.sum() for op in parallel.ops if op.phase == "dense_forward"]
    assert sum(op.cost_ms.sum() for op in rank_ops if op.phase == "dense_forward") > 3 * dense[0]
    assert time_ms(alone) > time_ms(parallel)


def test_its_gradients_are_not_reduced() -> None:
    reduces = [
        sum(
            op.cost_ms.sum() for op in graph(4, first_gpu=first_gpu).ops if op.phase == "all_reduce"
        )
        for first_gpu in (True, False)
    ]
    assert 0 < reduces[0] < reduces[1]


OLD, NEW = date(2020, 7, 4), date(2021, 6, 10)
SIZE = 2.0**30


def all_to_all_ms(hardware: HardwareProfile) -> float:
    return float(Collectives(hardware, a_topology(8)).all_to_all(SIZE))


def test_graphs_take_the_host_out() -> None:
    hardware = load_hardware("a100-80gb")
    runtime = load_examples()
    fused = runtime.profile(hardware, NEW).overheads
    assert (fused.op_us, fused.iteration_us, fused.collective_us) == (0, 0, 0)
    assert fused.launch_us == runtime.graph_node_us
    plain = runtime.profile(hardware, OLD).overheads
    assert plain.op_us == plain.layer_op_us == hardware.overheads.layer_op_us
    assert (plain.iteration_us, plain.launch_us) == (0, hardware.overheads.launch_us)


def test_fused_layers_and_interactions_are_not_atens() -> None:
    """Before, aten's kernels summed biases' gradients, and those of pairs in their places."""
    hardware, runtime = load_hardware("a100-80gb"), load_examples()
    assert hardware.elementwise.index_add_ns > 0 < hardware.elementwise.column_sum_us
    fused = runtime.profile(hardware, NEW).elementwise
    assert (fused.index_add_ns, fused.column_sum_us) == (0, 0)
    assert runtime.profile(hardware, OLD).elementwise == hardware.elementwise


def test_on_an_old_mesh_three_eighths_of_a_buffer_cross_the_sockets() -> None:
    """Four cards a socket send an eighth to each of three others that no NVLink joins to them."""
    hardware, runtime = load_hardware("v100-32gb"), load_examples()
    time = all_to_all_ms(runtime.profile(hardware, OLD, through_host=True))
    least = 4 * 3 / 8 * SIZE / gb_per_s(runtime.socket_link_gb_s)
    assert least < time < 1.01 * least
    assert runtime.crosses_sockets(8, OLD)
    assert not runtime.crosses_sockets(8, NEW)
    assert not runtime.crosses_sockets(4, OLD)


def test_tensorflow_left_the_first_gpu_in_2022() -> None:
    runtime = load_examples()
    assert runtime.on_first_gpu("tensorflow", NEW)
    assert not runtime.on_first_gpu("tensorflow", date(2022, 7, 11))
    assert runtime.on_first_gpu("pytorch", date(2022, 7, 11))
    assert not runtime.on_first_gpu("jax", NEW)
