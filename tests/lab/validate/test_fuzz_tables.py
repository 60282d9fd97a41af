"""Whatever is done to the bytes of a table, a suite reports or raises InputError, never crashes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lab.pages.scores import report_object
from lab.suites import SUITES as LISTED
from lab.validate.gemm import GEMM_FILE, MATMUL_FILE
from lab.validate.links import NCCL_FILE, VIDUR_FILE, VTRAIN_FILE
from lab.validate.mlperf import CONFIGS_FILE, PLANS_FILE, ROWS_FILE
from lab.validate.ops import FILE as OPS_FILE
from lab.validate.torchrec_p4d import FILE as P4D_FILE
from predictor.errors import InputError

pytestmark = pytest.mark.timeout(120)

NCCL = (
    "# a log\nsource,gpu,nodes,n_gpus,collective,size_bytes,time_us_out_of_place,time_us_in_place\n"
    + "".join(f"log,H100,1,8,alltoall,{2**e},{10 + 2**e / 1e5:.1f},\n" for e in range(10, 22))
    + "log,H100,2,16,allreduce,1048576,,55.5\n"
)
VIDUR = "platform,collective,num_workers,devices_per_node,size,us_min\n" + "".join(
    f"h100,all_reduce,{n},{n},{2**e},{9 + n}\n" for n in (2, 4) for e in (12, 16, 20)
)
VTRAIN = "gpu,n_gpus,size_bytes,time_us_out_of_place\n" + "".join(
    f"v100,{n},{2**e},{20 + n}\n" for n in (2, 3, 4) for e in (20, 22)
)
GEMM = (
    "split,device,B,M,N,K,latency_ms\n"
    "train,NVIDIA A100-PCIE-40GB,1,512,512,512,0.1\n"
    "test,NVIDIA A100-PCIE-40GB,4,512,1024,512,0.2\ntest,Tesla T4,1,8,8,8,0.05\n"
)
MATMUL = (
    "# kernels\ngpu,b,m,n,k,lhs,rhs,out,time_us,date,flag\n"
    "H100,1,512,512,512,bf16,bf16,bf16,6.0,2025-10-21,\n"
    "H100,2,512,512,512,f32,f32,f32,12.0,2025-10-21,\nMI300X,1,512,512,512,bf16,bf16,bf16,6,x,\n"
)
OPS = (
    "source,pr,gpu,op,impl,shape,dtype,mode,time_us,ideal_bytes_GB\n"
    "r,#1,H100 96GB,pooled regroup,triton,see PR,fp32,fwd+bwd,900,2.0\n"
    "r,#1,H100 96GB,batch_index_select,torch,T16 R1 B256,fp16,fwd,120,0.002\n"
    "r,#1,GB300,mx4 dequantize,triton,out 1000000 group 16,fp32 out,fwd,9,\n"
)
SYSTEMS = (
    "round,org,system,benchmark,nodes,accel_per_node,accelerator,accel_interconnect,cpu,"
    "global_batch,iter_ms_median\n"
    "v4.0,Org,box,dlrm_dcnv2,1,2,NVIDIA H100-SXM5-80GB,NVLink,cpu,16384,2.0\n"
    "v2.1,Org,old,dlrm,1,2,NVIDIA A30,,cpu,8192,3.0\nv4.0,Org,rack,dlrm_dcnv2,4,0,N/A,,x,64,200\n"
)
CONFIGS = (
    "round,org,global_batch,nodes,gpus_per_node,sharding_plan,mem_comm_bw_ratio,"
    "dp_sharding_threshold_gb\nv4.0,Org,16384,1,2,auto,7,0.008 (default)\n"
)
PLANS = json.dumps(
    {
        "table_rows": [1000, 400000, 50],
        "multi_hot": [3, 2, 1],
        "plans": [
            {
                **{"nodes": 1, "gpus_per_node": 2, "plan": "auto", "dp_threshold_gb": 0.008},
                **{"mem_comm_bw_ratio": 7.0, "dp_tables": [2]},
                "mp_tables_per_bucket": [[0], [1]],
            }
        ],
    }
)
P4D = (
    "source,n_gpus,local_batch,interaction_optimizer,iter_ms_derived\n"
    'mlcommons,8,2048,"dot, SGD",9.8\n'
)
SUITES = {
    "collectives": {NCCL_FILE: NCCL, VIDUR_FILE: VIDUR, VTRAIN_FILE: VTRAIN},
    "torchrec-p4d": {P4D_FILE: P4D},
    "gemm": {GEMM_FILE: GEMM, MATMUL_FILE: MATMUL},
    "ops": {OPS_FILE: OPS},
    "mlperf-dlrm": {ROWS_FILE: SYSTEMS, CONFIGS_FILE: CONFIGS, PLANS_FILE: PLANS},
}

CELLS = (
    *("", " ", "x", "0", "-1", "1", "3", "0.5", "7e7", "1e15", "1e-12", "1e300", "1e999", "nan"),
    *("inf", "9" * 30, "0x10", "1_000", "\u0661", '"', "a\u2028b", "#", "v", "v99", "dlrm", "TPU"),
)
PIECES = (
    *(b"\x00", b"\xff", b"\xef\xbb\xbf", b"\r\n", b"\n", b"\r", b'"', b",", b"[", b"}", b"#", b"-"),
    *(b"9" * 40, b"null", b"1e999", b"," * 50, b"\n\n\n", b'"' + b"x" * 200_000),
)


@st.composite
def damaged(draw: st.DrawFn, good: str) -> bytes:
    """A table after up to three changes of a cell or of its bytes."""
    data = good.encode()
    for _ in range(draw(st.integers(1, 3))):
        if draw(st.booleans()):
            lines = data.decode("utf-8", "replace").split("\n")
            at = draw(st.integers(0, len(lines) - 1))
            cells = lines[at].split(",")
            cells[draw(st.integers(0, len(cells) - 1))] = draw(st.sampled_from(CELLS))
            lines[at] = ",".join(cells)
            data = "\n".join(lines).encode()
            continue
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 40)))
        piece = draw(st.sampled_from(PIECES) | st.binary(max_size=4))
        data = data[:start] + piece + data[end:]
    return data


@pytest.mark.parametrize("suite", SUITES)
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_a_damaged_table_is_reported_or_refused(
    tmp_path: Path, suite: str, data: st.DataObject
) -> None:
    files = SUITES[suite]
    name = data.draw(st.sampled_from(sorted(files)))
    for other, text in files.items():
        (tmp_path / other).write_text(text)
    (tmp_path / name).write_bytes(data.draw(damaged(files[name])))
    try:
        report = LISTED[suite].run(tmp_path)
    except InputError as error:
        message = str(error)
    else:
        found = report_object(report)
        json.dumps(found, allow_nan=False)
        assert found["skipped"]["count"] == len(report.skipped)
        return
    assert str(tmp_path) in message
