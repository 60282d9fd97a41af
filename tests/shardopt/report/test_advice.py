"""Advice as a report shows it."""

from shardopt.api.document import AdviceKeys, Considered, NotTried
from shardopt.report.advice import advice
from shardopt.report.blocks import Line


def test_reasons_in_several_lines_are_shown_by_their_first() -> None:
    not_tried = [NotTried(name=name, why=f"no option is left\n  of {name}") for name in "ab"]
    considered = Considered(tried=1, not_tried=not_tried)
    answer = AdviceKeys(advice=[], together=None, advice_considered=considered, other_machines=[])
    texts = [block.text for block in advice(answer, "cuda") if isinstance(block, Line)]
    assert len(texts) == 1
    assert "\n" not in texts[0]
    assert texts[0].count("no option is left") == 1
