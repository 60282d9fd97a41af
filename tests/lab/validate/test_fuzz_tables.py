"""Whatever is done to the bytes of a table, a suite reports or raises InputError, never crashes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lab.pages.scores import report_object
from lab.suites import SUITES as LISTED
from predictor.errors import InputError
from tests.public_data import EXCERPTS

OPS = (
    "source,pr,gpu,op,impl,shape,dtype,mode,time_us,ideal_bytes_GB\n"
    "r,#1,H100 96GB,pooled regroup,triton,see PR,fp32,fwd+bwd,900,2.0\n"
    "r,#1,H100 96GB,batch_index_select,torch,T16 R1 B256,fp16,fwd,120,0.002\n"
    "r,#1,GB300,mx4 dequantize,triton,out 1000000 group 16,fp32 out,fwd,9,\n"
)
ROWS = 3
"""Of each excerpt, spread over it."""


def some_of(path: Path) -> str:
    """A file of the excerpts, of a table some rows."""
    lines = path.read_text().splitlines(keepends=True)
    if path.suffix != ".csv":
        return "".join(lines)
    head = next(at for at, line in enumerate(lines) if not line.startswith("#")) + 1
    return "".join([*lines[:head], *lines[head :: max(1, (len(lines) - head) // ROWS)][:ROWS]])


SUITES = {
    name: {file: some_of(EXCERPTS / file) for file in LISTED[name].tables}
    for name in (*("collectives", "gemm", "mlperf-dlrm"), *("dlrm-published", "torchrec-p4d"))
} | {"ops": {"membound_ops_measured.csv": OPS}}

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
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    (tmp_path / name).write_bytes(data.draw(damaged(files[name])))
    try:
        report = LISTED[suite].run(tmp_path)
    except InputError as error:
        message = str(error)
    else:
        document = report_object(report)
        json.dumps(document, allow_nan=False)
        assert document["skipped"]["count"] == len(report.skipped)
        return
    assert str(tmp_path) in message
