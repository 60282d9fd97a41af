"""The dense part out of Kineto traces: of TorchRec on two gloo ranks, and of public GPU jobs."""

import re
from pathlib import Path

import pytest

from lab.planners.reservation import dense_parameters
from predictor.model.plan import ShardingType
from predictor.model.plan_json import plan_to_dict
from predictor.model.workload import MeasuredDense
from predictor.trace.breakdown import breakdown
from predictor.trace.phases import PHASES, traced_dense
from predictor.trace.read import load_traces
from shardopt.cli.app import main
from shardopt.cli.output import to_json
from shardopt.config import load_model
from shardopt.config.write import write_model
from tests.distributed import training_case as case
from tests.public_data import TRACES, needs_public_data

RESNET_50 = 25_557_032
"""Parameters of torchvision's ResNet-50."""
SPARSE_KERNEL = re.compile(r"split_embedding|RadixSort|permute_|bounds_check|bucketize")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its plan and the traces of two ranks that trained it."""
    pytest.importorskip("torchrec")
    from tests.distributed.ranks import run_ranks

    job = tmp_path_factory.mktemp("job")
    (job / "traces").mkdir()
    write_model(job / "model.yaml", case.workload())
    plan = case.uniform_plan(ShardingType.ROW_WISE, 2, 2)
    (job / "plan.json").write_text(to_json(plan_to_dict(plan)))
    run_ranks("dense_trace_worker", job)
    return job


@pytest.mark.slow
@pytest.mark.distributed
def test_a_traced_training_gives_its_dense_part(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = job / "dense.yaml"
    assert main(["trace", str(job / "traces"), "--dense", str(written)]) == 0
    assert f"wrote {written}: forward" in capsys.readouterr().err

    model = (job / "model.yaml").read_text()
    head, tables = model.split("dense:")[0], "tables:" + model.split("tables:")[1]
    (job / "measured.yaml").write_text(head + tables + written.read_text())
    workload, dense = case.workload(), load_model(job / "measured.yaml").dense
    assert isinstance(dense, MeasuredDense)
    assert dense.batch_size == workload.batch_size
    assert dense.gradient_bytes == 4 * dense_parameters(workload)
    assert dense.optimizer == workload.dense.optimizer
    assert dense.activation_bytes is not None
    assert dense.activation_bytes > 4 * workload.batch_size * sum(workload.dlrm.bottom_mlp)
    traces = load_traces([job / "traces"]).traces
    steps = [s.measured_ms for t in traces for s in breakdown(t)]
    assert 0 < sum(getattr(dense, f"{p}_ms") for p in PHASES) < max(steps)


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
    measured = traced_dense([trace], 64).measured
    found = sum(getattr(measured, f"{p}_ms") for p in PHASES)
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
    assert 0.98 * min(surely) <= found <= 1.02 * max(most)


@needs_public_data
def test_ddp_reduces_the_gradients_of_all_parameters() -> None:
    found = load_traces([TRACES / "hta_nccl_parser_rank0of2.json.gz"])
    assert traced_dense(found.traces, 64).measured.gradient_bytes == 4 * RESNET_50
