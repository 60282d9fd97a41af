"""What is said where sharding hardly matters, in words and in JSON."""

import json

from search.expected_gain import Stakes
from shardopt.explain.stakes import Alternatives, instead_text
from shardopt.explain.whatif import WhatIf
from shardopt.report.objects import instead_object

FOUND = Alternatives(
    Stakes(9, 0.007, matters=False),
    0.08,
    (("dense_backward", 0.6), ("dense_forward", 0.3)),
    (WhatIf("rate", "matrix multiplication rate +10 %", 90.0, -8.5),),
)


def test_the_sentence_names_plans_shares_and_what_would_help() -> None:
    text = instead_text(FOUND)
    assert text.startswith("Sharding hardly matters here: 9 sane plans are within 0.7 %")
    assert "lookups and exchanges take 8.0 % of the iteration" in text
    assert "dense backward 60 %, dense forward 30 %" in text
    assert text.endswith("matrix multiplication rate +10 %: 8.500 ms less.")


def test_json_has_the_same() -> None:
    found = instead_object(FOUND)
    assert found is not None
    assert json.loads(json.dumps(found))["changes"] == [
        {"change": "matrix multiplication rate +10 %", "change_ms": -8.5}
    ]
    assert (found["plans"], found["sparse_share"]) == (9, 0.08)
    assert instead_object(None) is None
