"""How execution traces are tied to Kineto's."""

from dataclasses import replace
from pathlib import Path

import pytest

from predictor.trace.read import attach, load_traces
from tests.predictor.trace.synthetic import OLD, RECENT, execution, kineto, read_kineto, write


@pytest.mark.parametrize("schema", [RECENT, OLD])
@pytest.mark.parametrize("nested", [False, True])
def test_ops_get_their_nodes(tmp_path: Path, schema: str, nested: bool) -> None:
    """By the number of the call since PyTorch 2.4, by the order of names before; every step."""
    trace = read_kineto(write(tmp_path, "k.json", kineto(schema=schema)))
    bare = replace(
        trace,
        host=tuple(replace(e, shapes=None, dtypes=None) for e in trace.host),
        device=tuple(
            replace(e, collective=e.collective and replace(e.collective, size_bytes=None))
            for e in trace.device
        ),
        notes=("2 collectives without a size; record shapes, or give execution traces",),
    )
    (run,) = load_traces([write(tmp_path, "et_0.json", execution(nested=nested))]).executions
    tied = attach(bare, run)
    steps = 1 if schema == RECENT else 2
    named = [(e.name, e.node) for e in tied.host if e.node is not None]
    assert named == steps * [
        ("aten::mm", 3),
        ("c10d::allreduce_", 4),
        ("record_param_comms", 5),
        ("nccl:all_reduce", 6),
        ("aten::add", 7),
    ]
    product = next(e for e in tied.host if e.name == "aten::mm")
    assert (product.shapes, product.dtypes) == (((10, 10), (10, 10)), ("float", "float"))
    sizes = [e.collective.size_bytes for e in tied.device if e.collective]
    assert sizes == ([4000, None] if steps == 1 else [4000, 4000])
    assert tied.notes == (
        ("1 collectives without a size; record shapes, or give execution traces",)
        if steps == 1
        else ()
    )


def test_another_program_is_left_out(tmp_path: Path) -> None:
    document = execution()
    for node in document["nodes"]:
        node["name"] = f"other::{node['id']}"
    trace = read_kineto(write(tmp_path, "k.json", kineto()))
    (run,) = load_traces([write(tmp_path, "et_0.json", document)]).executions
    tied = attach(trace, run)
    assert tied.host == trace.host
    assert "of another program: only 0%" in tied.notes[-1]
