"""Rows as a machine whose constants are known would give them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from predictor import units
from predictor.cost.collectives import OPS, Collectives
from predictor.cost.elementwise import columns_ms, memory_ms
from predictor.cost.gemm import batched_ms, gemm_ms, product_rate, small_product_ms
from predictor.hardware.schema import Curve, HardwareProfile
from predictor.iteration.plan_scorer import PlanScorer
from predictor.model.plan_check import match_plan
from predictor.model.topology import Topology
from shardopt.calibrate import lookups
from shardopt.calibrate.fitting import FreeConstant
from shardopt.calibrate.host import LAYER_KERNELS, LAYER_OPS, iteration_points, near_empty
from shardopt.calibrate.points import Point
from shardopt.calibrate.rows import PARTS, Measurement, row_of_samples
from shardopt.measure.sampling import Samples

CALL_US = 7.0
"""What a row of a small kernel has beyond its data: the floor of these machines."""
PIECE_US = 0.3
"""Of each tensor that is joined or taken apart."""
STEP_US = {"sgd": 5.0, "adagrad": 12.0, "adam": 25.0}
ISSUE_US, LAYER_OP_US = 60.0, 3.0


def row(point: Point, time_ms: float, part: str = "", **facts: object) -> Measurement:
    """Three samples that agree."""
    measurement = row_of_samples(point, Samples((time_ms * 1e-3,) * 3), part, **facts)
    return replace(measurement, date="2026-01-02T03:04:05Z")


def changed(hw: HardwareProfile, group: str, **constants: float) -> HardwareProfile:
    """A profile with other constants in a group."""
    for key, value in constants.items():
        hw = FreeConstant(group, key, 0.0, 0.0).put(hw, value)
    return hw


def with_groups(hw: HardwareProfile, **groups: Mapping[str, Any]) -> HardwareProfile:
    """A profile with other constants, whatever their types, in some groups."""
    changed = {name: getattr(hw, name).model_copy(update=update) for name, update in groups.items()}
    return hw.model_copy(update=changed)


def cpu_rows(hw: HardwareProfile, points: Iterable[Point]) -> list[Measurement]:
    """Return rows of one core with the constants of a profile and floors of `CALL_US`."""
    bare = with_groups(hw, gemm={"floor_us": 0.0}, elementwise={"floor_us": 0.0})
    return [
        row(point, units.us(CALL_US) + _cpu_ms(bare, point, part), part, **facts_of(point))
        for point in points
        for part in PARTS.get(point.family, ("",))
    ]


def _cpu_ms(hw: HardwareProfile, point: Point, part: str) -> float:
    """Beyond the call."""
    p, back = point.params, part == "backward"
    facts, us, ns = facts_of(point), units.us(1.0), units.us(1e-3)
    moves, gemm = hw.elementwise, hw.gemm
    match point.family:
        case "lookup" | "lookup_variant" | "lookup_dense" | "lookup_unpooled":
            names = lookups.UNPOOLED[part] if point.family == "lookup_unpooled" else None
            names = names or (lookups.BACKWARD if back else lookups.FORWARD)
            if back and point.family == "lookup_dense":
                names = lookups.DENSE
            blank = row(point, 1.0, part, **facts)
            return float(lookups.predict_lookups(hw.embedding, [blank], names)[0])
        case "gemm":
            return gemm_ms(hw, p["m"], p["n"], p["k"], p["dtype"])
        case "product":
            return p["count"] * small_product_ms(gemm.batches[p["layout"]], p["m"], p["n"], p["k"])
        case "interaction":
            return _interaction_ms(hw, p, back)
        case "attention":
            heads, flop = p["batch"] * p["heads"], (10 if back else 4)
            work = flop * p["length"] ** 2 * p["width"] / product_rate(gemm, "fp32", hw.name)
            share = gemm.attention_backward if back else gemm.attention_forward
            return heads * (us * gemm.attention_head_us[back] + work / share)
        case "elementwise":
            return float(memory_ms(hw, facts["bytes_moved"]))
        case "pooled":
            return us * PIECE_US * facts["pieces"] + float(columns_ms(hw, 2 * facts["bytes"]))
        case "jagged":  # ids are read and written twice
            return facts["ids"] * (ns * moves.bucketize_ns_per_id + 4 * 8 / hw.streaming)
        case "function":
            each = ns * moves.math_ns_per_element + (12 if back else 8) / hw.streaming
            return p["elements"] * each
        case "concatenation":
            beyond = {"whole": 0.0, "sliced": moves.sliced_ns_per_element}
            each = ns * beyond.get(p["form"], moves.turned_ns_per_element)
            count = p["pieces"] * p["rows"] * p["width"]
            return float(columns_ms(hw, 8 * count)) + each * count
        case "layers":
            return us * p["depth"] * (LAYER_KERNELS * CALL_US + LAYER_OPS * LAYER_OP_US)
        case "optimizer":
            return us * STEP_US[p["op"]] * facts["tensors"]
    return 0.0


def _interaction_ms(hw: HardwareProfile, p: dict[str, int], back: bool) -> float:
    """A product forward, two backward; around them vectors are stacked, and pairs picked."""
    batch, v, dim = p["batch"], p["vectors"], p["dim"]
    hw = with_groups(hw, gemm={"batches": {}})
    time = batched_ms(hw, batch, v, v, dim, "fp32")
    if back:
        # both operands are the same: two gradients are written, then added
        added = float(memory_ms(hw, 5 * 4 * batch * v * dim))
        time = 2 * batched_ms(hw, batch, v, dim, v, "fp32") + added + units.us(CALL_US)
    if p["op"] == "bmm":
        return time
    picked = (2 if back else 1) * batch * v * (v - 1) / 2
    moved = float(columns_ms(hw, 2 * 4 * batch * v * dim) + memory_ms(hw, 2 * 4 * picked))
    # stacked, picked, joined to the dense vector
    calls = 3 * CALL_US + 1e-3 * hw.elementwise.gather_ns_per_element * picked
    return time + moved + units.us(calls)


def facts_of(point: Point) -> dict[str, Any]:
    """Return the facts of a point as a measurement would report them."""
    p = point.params
    match point.family:
        case "elementwise":
            return {"bytes_moved": (3 if p["op"] == "add" else 2) * p["bytes"]}
        case "pooled":
            return {"pieces": len(p["dims"]), "bytes": 4 * p["batch"] * sum(p["dims"])}
        case "jagged":
            return {"ids": p["features"] * p["batch"] * p["pooling"]}
        case "optimizer":
            return {"tensors": 2 * p["layers"], "elements": 64}
    if not point.family.startswith("lookup"):
        return {}
    tables = []
    for table in p["tables"]:
        ids = p["batch"] * table["pooling"]
        # distinct rows follow from nothing else
        share = np.random.default_rng([round(ids), table["rows"]]).uniform(0.1, 1.0)
        distinct = min(ids, table["rows"]) * float(share)
        tables.append([table["rows"], table["dim"], p["batch"], ids, distinct])
    return {"tables": tables}


def collective_rows(hw: HardwareProfile, points: Iterable[Point]) -> list[Measurement]:
    """Return rows of ranks that take `ISSUE_US` to issue one, joined as the points say."""
    rows = []
    for point in points:
        p = point.params
        local = 1 if "link_gbit_s" in p else p["ranks"] // p.get("hosts", 1)
        links = Collectives(hw, topology(p["ranks"], local))
        wire_ms = 0.0 if p["op"] == "issue" else float(links._time(p["op"], p["bytes"], "world"))
        rows.append(row(point, units.us(ISSUE_US) + wire_ms))
    return rows


def topology(ranks: int, local: int) -> Topology:
    """With room for anything."""
    return Topology.uniform(ranks, local, hbm_bytes=2**36, ddr_bytes=2**36)


def iteration_rows(
    hw: HardwareProfile, latency_us: float | Mapping[str, float], **among: object
) -> list[Measurement]:
    """Near-empty iterations of a profile's overheads; parts ``wall`` and ``cpu`` of every point.

    A message takes ``latency_us`` beyond the main thread, of its collective or of all alike; where
    ids travel ahead, all is hidden.
    """
    latencies = latency_us if isinstance(latency_us, Mapping) else dict.fromkeys(OPS, latency_us)
    curves = {
        op: Curve(latency_us=latencies[op], edge_mib=(0.0,), us_per_mib=(1e-9,)) for op in OPS
    }
    links = hw.collectives
    wires = {n: getattr(links, n).model_copy(update=curves) for n in ("intra", "inter")}
    # a table with next to no ids takes less than the constant that other tables were fitted on
    tables = {"forward_table_us": 0.0, "backward_table_us": 0.0}
    hw = with_groups(hw, embedding=tables, overheads={"collective_us": 0.0}, collectives=wires)
    rows = []
    for point in iteration_points(2, **among):
        workload, plan = near_empty(point.params)
        where = topology(2, plan.local_world_size)
        scorer = PlanScorer(workload, where, hw)
        graph = scorer.graph(scorer.totals(match_plan(workload, where, plan))[None])
        spent = {True: 0.0, False: sum(op.host_ms for op in graph.ops)}
        for op in graph.ops:
            spent[op.resource == "collectives"] += float(op.cost_ms.max())
        hidden = point.params["pipeline"] != "base"
        rows.append(row(point, spent[False] + (0.0 if hidden else spent[True]), "wall"))
        rows.append(row(point, spent[False], "cpu"))
    return rows
