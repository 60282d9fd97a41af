"""Scaled programs are those of a capture at the scaled batch."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from predictor.errors import InputError
from shardopt.replay.program.program import Number, RankProgram
from shardopt.replay.scale.doubled import scale_by_pair
from tests.quick import quick_only
from tests.shardopt.replay.captured import capture, program, step_of
from tests.shardopt.replay.differences import differences, signatures


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], RankProgram]:
    place = tmp_path_factory.mktemp("batches")
    return lambda batch: program(capture(step_of(batch), place / str(batch)))


def test_scaled_programs_are_those_of_the_batch(at: Callable[[int], RankProgram]) -> None:
    one, two, six = at(4), at(8), at(24)
    made = scale_by_pair(one, two, 6)
    found = list(differences(signatures(made), signatures(six)))
    assert not found, "\n".join(found)
    assert {n: replace(s, storage=0) for n, s in made.made.items()} == {
        n: replace(s, storage=0) for n, s in six.made.items()
    }
    assert made.fills == six.fills
    assert all(call.us is None for call in made.calls)
    assert list(differences(signatures(made), signatures(two)))
    same = scale_by_pair(one, two, 1)
    assert signatures(same) == signatures(one)


def test_squares_of_the_batch_are_refused(tmp_path: Path) -> None:
    one, two = (program(capture(step_of(n, squared=True), tmp_path / str(n))) for n in (4, 8))
    with pytest.raises(InputError, match="aten::div: a size goes from 16 to 64"):
        scale_by_pair(one, two, 3)


def test_what_does_not_scale_is_refused(traces: Path) -> None:
    one = program(traces)
    calls = [
        replace(call, arguments=(*call.arguments, Number(0.5))) if call.op == "aten::relu" else call
        for call in one.calls
    ]
    more = [
        replace(call, arguments=(*call.arguments[:-1], Number(0.25)))
        if call.op == "aten::relu"
        else call
        for call in calls
    ]
    with pytest.raises(InputError, match="aten::relu"):
        scale_by_pair(replace(one, calls=calls), replace(one, calls=more), 2)
    with pytest.raises(InputError, match="same ops on the same tensors"):
        scale_by_pair(one, replace(one, calls=one.calls[1:]), 2)


@pytest.mark.parametrize("family", quick_only(["gpt2"], ["bert", "gpt2", "xlnet"]))
def test_transformers_scale(family: str, tmp_path: Path) -> None:
    pytest.importorskip("torchrec")
    from lab.replay.transformers import Training
    from lab.transformers import TransformerShape

    def captured(batch: int) -> RankProgram:
        training = Training(TransformerShape(family, 1, 32, 2, 64, 50, 8, batch))
        return program(capture(training.step, tmp_path / str(batch)))

    made, whole = scale_by_pair(captured(2), captured(4), 5), captured(10)
    assert not list(differences(signatures(made), signatures(whole)))
    assert made.fills == whole.fills
