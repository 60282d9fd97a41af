"""Scaled programs are those of a capture at the scaled batch."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from predictor.errors import InputError
from shardopt.replay.doubled import scale_by_pair
from shardopt.replay.program.program import RankProgram
from tests.quick import quick_only
from tests.shardopt.replay.captured import capture, program, step_of, transformer_step
from tests.shardopt.replay.differences import check_equal, differences, signatures


def test_scaled_programs_are_those_of_the_batch(tmp_path: Path) -> None:
    of_4, of_8, of_24 = (program(capture(step_of(n), tmp_path / str(n))) for n in (4, 8, 24))
    scaled = scale_by_pair(of_4, of_8, 6)
    check_equal(scaled, of_24)
    assert list(differences(signatures(scaled), signatures(of_8)))
    assert signatures(scale_by_pair(of_4, of_8, 1)) == signatures(of_4)


def test_squares_of_the_batch_are_refused(tmp_path: Path) -> None:
    of_4, of_8 = (program(capture(step_of(n, squared=True), tmp_path / str(n))) for n in (4, 8))
    with pytest.raises(InputError, match=r"aten::div: .*16 to 64"):
        scale_by_pair(of_4, of_8, 3)


def with_factor(recorded: RankProgram, factor: float) -> RankProgram:
    """Its activations take one more argument."""
    calls = [
        replace(call, arguments=(*call.arguments, factor)) if call.op == "aten::relu" else call
        for call in recorded.calls
    ]
    return replace(recorded, calls=calls)


def test_what_does_not_scale_is_refused(traces: Path) -> None:
    recorded = program(traces)
    with pytest.raises(InputError, match="aten::relu"):
        scale_by_pair(with_factor(recorded, 0.5), with_factor(recorded, 0.25), 2)
    with pytest.raises(InputError, match="rank 0"):
        scale_by_pair(recorded, replace(recorded, calls=recorded.calls[1:]), 2)


@pytest.mark.parametrize("family", quick_only(["gpt2"], ["bert", "gpt2", "xlnet"]))
def test_transformers_scale(family: str, tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    of_2, of_4, of_10 = (
        program(capture(transformer_step(family, n), tmp_path / str(n))) for n in (2, 4, 10)
    )
    check_equal(scale_by_pair(of_2, of_4, 5), of_10)
