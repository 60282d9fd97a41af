"""Golden texts of the reports, on data made by hand, so that no constant changes them."""

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from predictor.hardware.loader import load_hardware
from predictor.iteration.critical_path import Segment
from predictor.iteration.graph import Graph
from predictor.iteration.timeline import Timeline
from predictor.model.memory.ranks import RankMemory, RankPeak
from predictor.model.plan import ShardingPlan
from predictor.model.plan_json import plan_from_dict
from predictor.model.topology import Topology
from predictor.model.workload import DenseArch, Feature, Table, Workload
from predictor.predict import Prediction, RankLoad
from predictor.units import GIB
from search.baselines.starting_plans import TORCHREC
from search.expected_gain import ExpectedGain
from search.problem import RankedPlan, Result, ScenarioTimes
from search.tune.advice import Advice, Advised, OtherMachine
from search.tune.knobs import Step
from shardopt.api.answer import Answer
from shardopt.api.document import ExplainAnswer, GivenPlan, advice_keys, changes_keys, path_keys
from shardopt.api.setting import Setting
from shardopt.explain.changes import Changes, PlanChange
from shardopt.explain.waits import Cause, Wait
from shardopt.explain.whatif import WhatIf
from shardopt.report import explain
from shardopt.report.blocks import Block, Line, TextTable
from shardopt.report.console import draw, make_console
from shardopt.report.diff import diff_view
from shardopt.report.plan import headline, report
from shardopt.report.prediction import predictions

Golden = Callable[[str, str], None]

WIDTHS = (80, 100)
END = ("Plan 1 is written to plan.json. Next:", "shardopt explain m plan.json")


def prediction(scale: float = 1.0, ranks: int = 2, used_gib: float = 40.0) -> Prediction:
    parts = {
        "embedding_forward": 1.5,
        "output_dist_forward": 0.5,
        "dense_forward": 2.0,
        "dense_backward": 4.0,
        "embedding_backward": 1.75,
        "host": 0.25,
    }
    breakdown = {phase: value * scale for phase, value in parts.items()}
    total = sum(breakdown.values())
    loads = tuple(
        RankLoad(
            rank,
            {
                "embedding_forward": 1.5 * scale / (rank + 1),
                "embedding_backward": 1.75 * scale / (rank + 1),
                "output_dist_forward": 0.5 * scale,
                "dense_backward": 6.0 * scale,
            },
            idle_ms=total - scale * (6.0 + 3.25 / (rank + 1)),
        )
        for rank in range(ranks)
    )
    now, path = 100.0, []
    for phase, value in breakdown.items():
        name = "host issues work" if phase == "host" else f"{phase} op"
        path.append(Segment(name, phase, "embedding", 0, now, now + value))
        now += value
    memory = tuple(
        RankMemory(rank, used, 64 * GIB, 0, 256 * GIB, RankPeak(0, used, used, 64 * GIB, 64 * GIB))
        for rank, used in ((r, round(used_gib * GIB / (r + 1))) for r in range(ranks))
    )
    return Prediction(
        iteration_ms=total,
        interval_ms=(total * 0.9, total * 1.12),
        breakdown=breakdown,
        per_rank=loads,
        memory=memory,
        provenance="derived",
        critical_path=tuple(path),
        graph=Graph(ranks, ranks),
        timeline=Timeline(*(None, (), None)),  # type: ignore[arg-type]
    )


def setting() -> Setting:
    tables = tuple(
        Table(name, rows, 64, (Feature(f"f_{name}", 20.5),))
        for name, rows in (("users", 200_000_000), ("items", 50_000), ("days", 7))
    )
    workload = Workload("small", 512, tables, DenseArch(13, (64,), (64, 1)))
    installed = Topology.uniform(2, hbm_bytes=80 * GIB, ddr_bytes=256 * GIB)
    usable = Topology.uniform(2, hbm_bytes=64 * GIB, ddr_bytes=256 * GIB)
    note = "hardware is h100-sxm, the default; --hardware chooses another profile"
    profile = load_hardware("h100-sxm")
    return Setting(workload, usable, installed, profile, "h100-sxm", "default", (note,))


def an_answer(plan_data: dict[str, Any], bound_ms: float = 9.5) -> Answer:
    plan = plan_from_dict(plan_data, where="plan")
    predictions = [prediction(), prediction(1.0625), prediction(1.5)]
    plans = tuple(
        RankedPlan(plan, p.iteration_ms, found_by)
        for p, found_by in zip(predictions, ("cpsat", "optuna", "torchrec_greedy"), strict=True)
    )
    baselines = {"torchrec_greedy": 15.0, "greedy_size": 12.5, "random": 31.0, "even": 10.0}
    result = Result(plans, bound_ms, "work", baselines, {}, 1.25, 4321, 0)
    gain = ExpectedGain("torchrec default", 0.021, (-0.0104, 0.0496), 0.034, 128)
    head = setting().head(0)
    return Answer(setting(), result, tuple(predictions), head, gain=gain, advised=advised(plan))


def advised(plan: ShardingPlan) -> Advised:
    case = setting().case()

    def step(name: str, target: str | None, value: str | bool, how: str) -> Step:
        return Step(name, target, value, lambda case: case, (), how)

    dedup = step("index_dedup", "items", True, "use_index_dedup=True of the sharder")
    second = step("qcomm", None, "bf16", "codecs of the sharders")
    return Advised(
        (
            Advice((dedup,), case, plan, 7.2, 0.28, ("0.3 GiB more on the fullest rank",), True),
            Advice((second,), case, plan, 8.4, 0.16, ("changes numerics",), False),
        ),
        Advice((dedup, second), case, plan, 6.1, 0.39, ("changes numerics",), False),
        (OtherMachine("gpus", 4, 11.0, 0.45, 1.1), OtherMachine("network", 2.0, 9.5, 0.05, 0.95)),
        23,
    )


def drawn(width: int, blocks: Sequence[Block]) -> str:
    stream = io.StringIO()
    draw(make_console(stream, width=width), blocks)
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= width
    return text


@pytest.mark.parametrize("width", WIDTHS)
def test_plan(width: int, plan_data: dict[str, Any], golden: Golden) -> None:
    golden(f"plan_{width}.txt", drawn(width, report(an_answer(plan_data).document(), END)))


def said(answer: Answer) -> str:
    """The report, in one line."""
    return " ".join(drawn(100, report(answer.document(), END)).split())


def test_what_is_proved(plan_data: dict[str, Any]) -> None:
    assert "plan 1 is optimal" in said(an_answer(plan_data, bound_ms=10.0))
    nothing = an_answer(plan_data, bound_ms=0.0)
    assert "Nothing is proved" in said(nothing)
    assert "optimal" not in drawn(160, headline(nothing.document()))


def test_what_plan_1_gains(plan_data: dict[str, Any]) -> None:
    answer = an_answer(plan_data)
    sure = ExpectedGain("torchrec default", 0.12, (0.0996, 0.14), 0.13, 128)
    assert said(replace(answer, gain=sure)).startswith(
        "Use plan 1: it gains 12.0 % (+10.0 to +14.0)"
    )
    unsure = ExpectedGain("torchrec default", 0.12, (-0.0996, 0.34), 0.13, 128)
    assert said(replace(answer, gain=unsure)).startswith("Plan 1 may gain 12.0 % (-10.0 to +34.0)")
    none = ExpectedGain("torchrec default", 0.02, (-0.0996, 0.14), 0.004, 128)
    assert said(replace(answer, gain=none)).startswith("Keep TorchRec's plan")
    worse = ExpectedGain("torchrec default", -0.02, (-0.0996, 0.14), 0.03, 128)
    assert said(replace(answer, gain=worse)).startswith("Plan 1 is predicted to gain 3.0 %")
    alone = said(replace(answer, gain=None))
    assert alone.startswith("Use plan 1")
    assert "TorchRec's plan" not in alone
    assert "more than the plan" not in alone
    fastest = replace(answer.result.best, iteration_ms=answer.result.best.iteration_ms / 1.003)
    result = replace(answer.result, fastest=fastest)
    assert "predicted to be 0.3 % faster" in said(replace(answer, result=result))


def test_torchrecs_plan_has_one_row_whoever_found_it(plan_data: dict[str, Any]) -> None:
    answer = an_answer(plan_data)
    first, *_ = answer.result.plans
    baselines = {TORCHREC: first.iteration_ms}
    for theirs, rows in (({TORCHREC: first.plan}, 3), ({}, 4)):
        found = replace(answer.result, baselines=baselines, baseline_plans=theirs)
        blocks = report(replace(answer, result=found).document(), END)
        (ranking,) = [b for b in blocks if isinstance(b, TextTable) and "~found by" in b.columns]
        assert len(ranking.rows) == rows


def test_quiet_plan_is_one_short_line_and_a_regret(plan_data: dict[str, Any]) -> None:
    answer = an_answer(plan_data)
    (text,) = drawn(160, headline(answer.document())).splitlines()
    assert text.startswith("10.00 ms per iteration, at most 5.3 % from optimal; 1 TW, 1 CW")
    times = ScenarioTimes("windy", 1.0, 10.4, 10.0, 9.9)
    result = replace(answer.result, aim="regret", scenarios=(times,))
    assert (
        "4.0 %" in drawn(160, headline(replace(answer, result=result).document())).splitlines()[1]
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_predict(width: int, plan_data: dict[str, Any], golden: Golden) -> None:
    plan = plan_from_dict(plan_data, where="plan")
    plans = [
        GivenPlan.of(plan, prediction(1.25), plan="slow.json"),
        GivenPlan.of(plan, prediction(), plan="fast.json"),
        GivenPlan.of(plan, prediction(1.125, used_gib=65.5), plan="large.json"),
    ]
    golden(f"predict_{width}.txt", drawn(width, predictions(plans)))


def test_a_doubt_is_printed_once_and_names_its_plans_unless_all_share_it(
    plan_data: dict[str, Any],
) -> None:
    plan = plan_from_dict(plan_data, where="plan")
    ops = [{"shared": 2}, {"shared": 2}, {"shared": 2, "alone": 1}]
    plans = [
        GivenPlan.of(plan, replace(prediction(), dense_ops_by_bytes=calls), plan=f"{name}.json")
        for name, calls in zip("abc", ops, strict=True)
    ]
    for several, doubts in ((plans[:2], 1), (plans, 2)):
        shown = predictions(several)
        texts = [line.text for line in shown if isinstance(line, Line) and "shared" in line.text]
        assert len(texts) == doubts
        assert sum("a.json, b.json" in text for text in texts) == doubts - 1
        assert sum("c.json" in text for text in texts) == doubts - 1


def explanation(
    plan_data: dict[str, Any], *, ranks: int = 20, alone: bool = False
) -> ExplainAnswer:
    """Explain two plans; with ``alone``, a plan without waits and without remedies."""
    plan = plan_from_dict(plan_data, where="plan")
    cause = Cause("ebc.CW lookup", "embedding_forward", 1.5, 0.75, {"users": 0.8})
    wait = Wait("ebc.CW.all_to_all", "output_dist_forward", 1, 0, 0.75, 0.5, ranks - 1, (cause,))
    change = PlanChange("users: from rank 0 to rank 3", {}, 9.0, 1.0)
    what_if = [
        WhatIf("bandwidth", "HBM bandwidth +10 %", 9.75, -0.25),
        WhatIf("skew", "all ids equally likely", 12.5, 2.5),
        WhatIf("limit", "no host overhead (such as CUDA graphs)", 10.0, 0.0),
    ]
    baseline = GivenPlan.of(plan, prediction(1.25, ranks=ranks), plan="other.json")
    explained = GivenPlan.of(plan, prediction(ranks=ranks), plan="plan.json")
    changes = Changes(512, () if alone else (change,))
    keys = {
        "setting": setting(),
        "lower_bound_ms": None,
        "critical_path": path_keys(explained.prediction.critical_path),
        "host_work": {},
        "waits": [] if alone else [wait],
        "changes": changes_keys(plan, changes),
        "memory_notes": [],
        "sensitivity": what_if,
        "deciding": [],
        "others": [] if alone else [baseline],
        "table_times": {},
        "critical_groups": frozenset(),
    }
    return ExplainAnswer.model_validate(
        {**vars(explained), **setting().facts(), **advice_keys(None), **keys}
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_explain(width: int, plan_data: dict[str, Any], golden: Golden) -> None:
    text = drawn(width, explain.report(explanation(plan_data)))
    golden(f"explain_{width}.txt", text)


def test_diff(plan_data: dict[str, Any], golden: Golden) -> None:
    a = plan_from_dict({**plan_data, "iteration_ms": 12.0}, where="a")
    items = plan_data["tables"]["items"]
    items["sharding_type"] = "table_wise"
    items["shards"] = [{"rank": 1, "offset": [0, 0], "size": [50000, 64]}]
    users = plan_data["tables"]["users"]
    users["compute_kernel"] = "fused_uvm_caching"
    users["cache_params"] = {"load_factor": 0.25}
    del plan_data["tables"]["days"]
    b = plan_from_dict({**plan_data, "iteration_ms": 9.0, "hardware": "h100-sxm"}, where="b")
    golden("diff_80.txt", drawn(80, diff_view(("a.json", "b.json"), a, b).full))


def test_many_ranks_are_shortened(plan_data: dict[str, Any]) -> None:
    text = drawn(80, explain.report(explanation(plan_data, ranks=64, alone=True)))
    for words in ("4 least busy of 64", "None of the 512", "no rank waits"):
        assert words in " ".join(text.split())
