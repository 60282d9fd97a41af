"""Copies of model files: values change, and no other text."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from predictor.errors import InputError
from shardopt.config.fill import fill_model

TEXT = """# a comment
name: m
tables:
  - name: a   # of users
    features:
      - {name: x, pooling_factor: 3, index_distribution: {zipf: {alpha: 1.1}}, id_order: random}
      - name: y
        pooling_factor: 2  # guessed
        index_distribution:
          zipf:
            alpha: 1.2
        # the end of y
      - name: z  # has no values
  - {name: b, features: [{name: w}, {name: v, index_distribution: {file: old.npz}}]}
dense: {in_features: 13}
"""
NEW = {"pooling_factor": 1.5, "index_distribution": {"file": "s.npz", "feature": "x"}}


def fill(*names: str) -> str:
    values = {name: NEW for name in names}
    return fill_model(TEXT, values, Path("/m/model.yaml"), Path("/m/sub/copy.yaml"))


def test_values_change_and_comments_stay() -> None:
    text = fill("x", "y", "z", "w")
    tables = yaml.safe_load(text)["tables"]
    for feature in (*tables[0]["features"], tables[1]["features"][0]):
        assert feature.items() >= NEW.items(), feature
    assert tables[0]["features"][0]["id_order"] == "random"
    for comment in ("# a comment", "# of users", "# guessed", "# the end of y", "# has no values"):
        assert comment in text
    assert text.endswith("dense: {in_features: 13}\n")


def test_other_files_are_named_from_the_copy() -> None:
    assert yaml.safe_load(fill())["tables"][1]["features"][1] == {
        "name": "v",
        "index_distribution": {"file": "../old.npz"},
    }
    assert fill().replace("../old.npz", "old.npz") == TEXT


def test_tables_of_a_csv_file_are_not_copied() -> None:
    with pytest.raises(InputError, match=r"m\.yaml: its tables are in a CSV file"):
        fill_model("tables: {csv: t.csv}", {}, Path("m.yaml"), Path("c.yaml"))
