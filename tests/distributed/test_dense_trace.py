"""The dense part out of Kineto traces: of TorchRec on two gloo ranks, and of public GPU jobs."""

import re
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from lab.planners.reservation import dense_parameters
from predictor.model.plan import ShardingType
from predictor.model.workload import MeasuredDense
from predictor.trace.breakdown import breakdown
from predictor.trace.phases import PHASES, traced_dense
from predictor.trace.read import load_traces
from shardopt.cli.app import main
from shardopt.config import load_model
from shardopt.config.write import write_model
from shardopt.training.batch import batch_ring
from shardopt.training.loop import Training
from tests.distributed import training_case as case
from tests.distributed.ranks import on_ranks
from tests.public_data import TRACES, needs_public_data

RESNET_50 = 25_557_032
"""Parameters of torchvision's ResNet-50."""
SPARSE_KERNEL = re.compile(r"split_embedding|RadixSort|permute_|bounds_check|bucketize")
STEPS = 4


def train_and_trace(folder: Path) -> None:
    """Train under TorchRec's profiler."""
    load, rank = case.workload(), dist.get_rank()
    plan = case.uniform_plan(ShardingType.ROW_WISE)
    training = Training(load, plan, case.CPU, batch_ring(load, rank=rank, size=2))
    training.step()
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=1),
        record_shapes=True,
        profile_memory=True,
    ) as profiler:
        for _ in range(1 + STEPS):
            training.step()
            profiler.step()
    profiler.export_chrome_trace(str(folder / f"rank{rank}.json"))


@pytest.mark.distributed
def test_a_traced_training_gives_its_dense_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, written, model = (tmp_path / name for name in ("traces", "dense.yaml", "model.yaml"))
    folder.mkdir()
    on_ranks(train_and_trace, folder)
    assert main(["trace", str(folder), "--dense", str(written)]) == 0
    assert f"wrote {written}" in capsys.readouterr().err

    workload = case.workload()
    write_model(model, workload)
    text = model.read_text()
    head, tables = text.split("dense:")[0], "tables:" + text.split("tables:")[1]
    model.write_text(head + tables + written.read_text())
    dense = load_model(model).dense
    assert isinstance(dense, MeasuredDense)
    assert dense.measured.batch_size == workload.batch_size
    assert dense.gradient_bytes == 4 * dense_parameters(workload)
    assert dense.optimizer == workload.dense.optimizer
    assert dense.activation_bytes is not None
    assert dense.activation_bytes > 4 * workload.batch_size * sum(workload.dlrm.bottom_mlp)
    steps = [s.measured_ms for t in load_traces([folder]).traces for s in breakdown(t)]
    assert 0 < sum(getattr(dense.measured, f"{p}_ms") for p in PHASES) < max(steps)


@needs_public_data
@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("hta_nccl_parser_rank0of2.json.gz", ""),  # ResNet-50: every kernel
        ("hta_trace_diff_control_rank3of8.json.gz", "gemm"),  # a TorchRec model
    ],
)
def test_the_dense_part_is_all_but_lookups_and_their_distribution(name: str, least: str) -> None:
    (trace,) = load_traces([TRACES / name]).traces
    measured = traced_dense([trace], 64).dense.measured
    dense_ms = sum(getattr(measured, f"{p}_ms") for p in PHASES)
    most, surely = [], []
    for step in trace.steps:
        times = [
            (e.name, (e.end_us - e.start_us) / 1e3)
            for e in trace.device
            if e.collective is None
            and e.kind == "kernel"
            and step.start_us <= e.start_us < step.end_us
        ]
        most.append(sum(ms for name, ms in times if not SPARSE_KERNEL.search(name)))
        surely.append(sum(ms for name, ms in times if least in name))
    assert 0.98 * min(surely) <= dense_ms <= 1.02 * max(most)


@needs_public_data
def test_ddp_reduces_the_gradients_of_all_parameters() -> None:
    traces = load_traces([TRACES / "hta_nccl_parser_rank0of2.json.gz"])
    assert traced_dense(traces.traces, 64).dense.gradient_bytes == 4 * RESNET_50
