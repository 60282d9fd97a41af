"""Edited and cut data files: the message names file and key."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from shardopt.replay.generate import generate
from shardopt.replay.runtime.checks import common_data, rank_data, read


@pytest.fixture(scope="module")
def data(traces: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("benchmark")
    generate([traces], folder)
    assert read(folder / "data.json", common_data)["world_size"] == 1
    return read(folder / "rank0.json", rank_data)


def _first(of: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = of["made"][next(iter(of["made"]))]
    return made


BAD: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (lambda of: of.pop("parts"), "`parts` is missing"),
    (lambda of: of.update(tensors="many"), '`tensors` must be a whole number from 0, not "many"'),
    (lambda of: of.update(tensors=3), "but `tensors` is 3"),
    (lambda of: of["calls"][2].pop("op"), "`calls[2].op` is missing"),
    (lambda of: of["calls"][2].update(reads=[-1]), "`calls[2].reads[0]` must be a whole number"),
    (lambda of: of["calls"].append("relu"), "must be an object"),
    (lambda of: of["parts"].append([0, 10**6]), "the first call of a part and the one after"),
    (lambda of: _first(of).update(dtype="float33"), ".dtype` must be a dtype of torch"),
    (lambda of: _first(of).update(dtype="nn"), ".dtype` must be a dtype of torch"),
    (lambda of: _first(of).update(strides=[1] * 9), ".strides` must be"),
    (lambda of: _first(of).update(shape=[2.5]), ".shape[0]` must be a whole number"),
    (lambda of: _first(of).update(fill={}), ".fill.kind` is missing"),
    (lambda of: of["left_out"].append({"op": "a", "us": 1}), "`left_out[0].reason` is missing"),
]


@pytest.mark.parametrize(("edit", "words"), BAD)
def test_edited_data(
    data: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    edit: Callable[[dict[str, Any]], Any],
    words: str,
) -> None:
    changed = json.loads(json.dumps(data))
    edit(changed)
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps(changed))
    with pytest.raises(SystemExit) as ended:
        read(path, rank_data)
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.startswith("rank0.json: ")
    assert words in said


@pytest.mark.parametrize("text", ["", '{"rank": 0, "calls": [{"op', "[]", "null"])
def test_data_that_is_cut_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = tmp_path / "rank0.json"
    path.write_text(text)
    with pytest.raises(SystemExit):
        read(path, rank_data)
    assert "rank0.json: " in capsys.readouterr().err
    with pytest.raises(SystemExit):
        read(tmp_path / "rank1.json", rank_data)
    assert "rank1.json: cannot be read" in capsys.readouterr().err
