"""Profiles of cards that no public table measures, derived from measured profiles.

A card's datasheet becomes a profile by the rules that each group's ``source`` states.
``python -m lab fit derive DIR`` writes the files that differ; a test holds the shipped ones to it.
`lab.fit.known_errors` computes ranges and errors from public rows; those that a shipped file states
are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from lab.fit.cards import CARDS, TENSOR_SHEETS, Card
from lab.fit.known_errors import Facts, with_facts
from lab.fit.profile_text import FlowLists
from predictor.cost.collectives import OPS
from predictor.hardware.loader import list_hardware, load_hardware, parse_hardware
from predictor.hardware.schema import GROUP_NAMES, HardwareProfile

HBM_SHARE = 0.8946
"""Share of its datasheet bandwidth that A100-40GB streams (owensgroup/ml_perf_model)."""
GEMM_SHARE = 0.826
"""Share of its datasheet peak that A100's fp32 fit reaches."""
FP32_SHARE = {"h100-sxm": 0.767, "h200-sxm": 0.767, "b200": 0.767}
"""The same without tensor cores on these and on cards like them: H100's, from `lab fit tables`."""
L2_GB_S, L2_SMS, L2_GHZ = 2270.9, 108, 1.095
"""L2 of A100-40GB and the core clock it was locked to (ml_perf_model)."""
PCIE_GB_S = {3: 15.75, 4: 31.5, 5: 63.0}
"""One direction of an x16 slot."""
BULK_SHARE = {3: 0.8, 4: 0.8, 5: 0.883}
"""Share of a slot's line rate that bulk copies reach; PCIe 3 and 4: nvbandwidth's page and A100,
12.4 and 24.8 GB/s; PCIe 5: H100, 55.6 GB/s (NVIDIA's post on nvbandwidth)."""
GDDR_UPDATES = 0.4
"""Share of the bandwidth of graphics memory that updates of rows reach: V100's, the lowest measured
share, as no row measures theirs."""
PEER_SHARE = 0.727
"""Bus bandwidth of an all-to-all over a slot's line rate, on RTX 6000D cards over PCIe 5."""
SWITCH_CARDS = 4
"""Cards behind one PCIe switch and its x16 uplink, in hosts of eight."""
UPLINK = SWITCH_CARDS * (8 - SWITCH_CARDS) / (8 - 1)
"""Load on a switch's uplink over that on a slot, in an all-to-all of eight."""
PEER_LATENCY_US = 48.0
"""Empty all-to-all on the same cards."""

DATA_TYPES = ("fp32", "tf32", "fp16", "bf16")
TENSOR_RULE = (
    " Tensor cores: kernels of {like} at the shares of the datasheet peaks that it reaches; "
    "operands into an SM by the boost clock, out of the L2 by SMs and clock."
)


def derive(card: Card) -> dict[str, Any]:
    """Return the profile of a card as plain data for its file."""
    like = load_hardware(card.like)
    data = like.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"known_error"})
    data |= {
        "name": card.name,
        "title": card.title,
        "hbm_gib": card.hbm_gib,
        "gpus_per_host": card.gpus_per_host,
        "nvlink_domain": card.nvlink_domain,
        "sms": card.sms,
    }
    data["memory"] = _memory(card, like)
    data["gemm"] = _gemm(card, data["gemm"])
    data["embedding"] = _taken(
        data["embedding"], card, round(max(0.2, like.embedding.rel_error + 0.05), 2)
    )
    if card.gddr:
        data["embedding"]["backward_efficiency"] = GDDR_UPDATES
    data["elementwise"] = _taken(data["elementwise"], card, 0.2)
    data["overheads"] = _host(card)
    data["collectives"] = {
        "intra": _intra(card, data["collectives"]["intra"]),
        "inter": _inter(card, like),
    }
    return data


def _provenance(card: Card, source: str) -> dict[str, Any]:
    return {"kind": card.kind, "source": source}


def _taken(group: dict[str, Any], card: Card, rel_error: float) -> dict[str, Any]:
    source = f"Constants of {card.like} (see its source), on this device's own bandwidths."
    error = max(rel_error, float(group["rel_error"]))
    return group | {"provenance": _provenance(card, source), "rel_error": error}


def _host(card: Card) -> dict[str, Any]:
    """Return the costs of the host, which depend on its age, not on the card."""
    name = card.host or card.like
    group = load_hardware(name).overheads.model_dump(mode="json", exclude_none=True)
    return group | {
        "provenance": _provenance(card, f"As {name}, whose hosts are of the same years.")
    }


def _memory(card: Card, like: HardwareProfile) -> dict[str, Any]:
    link = card.host_link_gb_s or round(BULK_SHARE[card.pcie] * PCIE_GB_S[card.pcie], 1)
    over = "C2C, 450 GB/s a direction" if card.host_link_gb_s else f"PCIe {card.pcie} x16"
    l2 = L2_GB_S * card.sms / L2_SMS * card.boost_ghz / L2_GHZ
    l2_rule = (
        f"the bytes per clock and SM of the same A100 times {card.sms} SMs and "
        f"{card.boost_ghz:g} GHz boost"
    )
    if card.like == "b200":
        l2, l2_rule = like.memory.l2_gb_s, "as b200"
    elif card.like in ("h100-sxm", "h200-sxm"):
        measured = TENSOR_SHEETS[card.like]
        clocks = card.sms * card.boost_ghz / (measured.sms * measured.boost_ghz)
        l2, l2_rule = like.memory.l2_gb_s * clocks, f"as {card.like}, by SMs and boost clock"
    if card.l2_gb_s:
        l2, l2_rule = card.l2_gb_s, f"as {card.like}, the same chip"
    return {
        "hbm_gb_s": round(HBM_SHARE * card.peak_gb_s),
        "l2_gb_s": round(l2),
        "l2_mib": card.l2_mib,
        "sector_bytes": 32,
        "host_link_gb_s": link,
        "host_link_latency_us": like.memory.host_link_latency_us,
        "ddr_gb_s": max(link, like.memory.ddr_gb_s)
        if card.host_link_gb_s
        else like.memory.ddr_gb_s,
        "provenance": _provenance(
            card,
            f"{card.peak_gb_s:g} GB/s ({card.sheet}) times {HBM_SHARE}, the fraction of its peak "
            f"that A100-40GB reaches (owensgroup/ml_perf_model analysis/utils.py); L2: {l2_rule}; "
            f"host link: {BULK_SHARE[card.pcie]} of {over}; host memory as {card.like}.",
        ),
        "rel_error": 0.15,
    }


def _gemm(card: Card, like: dict[str, Any]) -> dict[str, Any]:
    plain = FP32_SHARE.get(card.like, GEMM_SHARE)
    peaks = {
        name: round((plain if name == "fp32" else GEMM_SHARE) * peak, 3)
        for name, peak in card.tflops.items()
    }
    peaks |= dict(card.gemm.get("tflops", {}))
    # fp32 units compute the types that have no tensor cores
    peaks = {name: peaks.get(name, peaks["fp32"]) for name in DATA_TYPES}
    peaks_of = "datasheet peaks" if card.kind == "derived" else f"peaks ({card.sheet})"
    source = card.gemm_source or (
        f"Dense {peaks_of} times {GEMM_SHARE}, the fraction that A100's fp32 fit reaches"
        f"{'' if plain == GEMM_SHARE else f' (in fp32 {plain}, that of H100)'}; "
        f"tiles, prologue and floors of {card.like}.{card.gemm_note}"
    )
    group = like | dict(card.gemm) | {"tflops": peaks}
    if like["tensor_cores"]:
        group |= _tensor_cores(card, like, peaks)
        source += TENSOR_RULE.format(like=card.like)
    group = {key: value for key, value in group.items() if value != {}}
    return group | {"provenance": _provenance(card, source), "rel_error": card.gemm_error}


def _tensor_cores(card: Card, like: dict[str, Any], peaks: Mapping[str, float]) -> dict[str, Any]:
    """Return rates, kernels and batched kernels on tensor cores, by `TENSOR_RULE`."""
    measured = TENSOR_SHEETS[card.like]
    clock = card.boost_ghz / measured.boost_ghz
    rates = dict(peaks)
    for name, rate in like["tflops"].items():
        if name in like["tensor_cores"] and name not in card.gemm.get("tflops", {}):
            # the datasheets' fp8 is twice their bf16
            sheet = card.tflops.get(name, 2 * card.tflops["bf16"])
            rates[name] = round(sheet * rate / measured.tflops[name], 3)
    groups: dict[str, Any] = {"tflops": rates}
    for kind in ("tensor_cores", "tensor_batched"):
        groups[kind] = {
            name: cores
            | ({} if card.tensor_floor_us is None else {"floor_us": card.tensor_floor_us})
            | {
                limit: round(cores[limit] * scale)
                for limit, scale in (
                    ("sm_gb_s", clock),
                    ("l2_gb_s", clock * card.sms / measured.sms),
                )
                if limit in cores
            }
            for name, cores in like[kind].items()
        }
    return groups


def _intra(card: Card, like: dict[str, Any]) -> dict[str, Any]:
    if card.link == card.name:
        own = load_hardware(card.name).collectives.intra
        return own.model_dump(mode="json", exclude_none=True)
    if card.link is not None:
        note = f" ({card.link_note})" if card.link_note else ""
        source = f"Curves of {card.link}{note}, whose source says how they came."
        linked = load_hardware(card.link).collectives.intra
        group = linked.model_dump(mode="json", exclude_none=True)
        group |= {op: _scaled(group[op], card.link_factor) for op in OPS}
        if not card.switched:
            group.pop("in_switch", None)
        return group | {"provenance": _provenance(card, source), "rel_error": 0.12}
    rate = PEER_SHARE * PCIE_GB_S[card.pcie]
    curve = {
        "latency_us": 0.0,
        "latency_per_doubling_us": round(PEER_LATENCY_US / 4, 2),
        "edge_mib": [0],
        "us_per_mib": [round(2**20 / rate / 1e3, 3)],
    }
    source = (
        f"No NVLink: ranks reach each other over PCIe {card.pcie} x16 at {PEER_SHARE} of its "
        f"{PCIE_GB_S[card.pcie]:g} GB/s, the bus bandwidth that an all-to-all on RTX 6000D cards "
        f"reached over PCIe 5 (nccl-tests 2.18, 2x8 cards, {PEER_LATENCY_US:g} us empty). Eight "
        f"cards are taken to sit {SWITCH_CARDS} behind each of two switches with one x16 uplink: "
        f"in an all-to-all {SWITCH_CARDS} cards send {SWITCH_CARDS} of 7 parts through it, "
        f"{UPLINK:.3f} times what one slot carries; a ring crosses it once."
    )
    curves: dict[str, Any] = dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather"), curve)
    curves["all_to_all"] = curve | {"rank_cost": {2: 1.0, SWITCH_CARDS: 1.0, 8: UPLINK}}
    return curves | {"provenance": _provenance(card, source), "rel_error": 0.4}


def _scaled(curve: dict[str, Any], factor: float) -> dict[str, Any]:
    """Return a curve of a link with ``1 / factor`` of the bandwidth."""
    if factor == 1.0:
        return curve
    return dict(curve) | {"us_per_mib": [round(cost * factor, 3) for cost in curve["us_per_mib"]]}


def _inter(card: Card, like: HardwareProfile) -> dict[str, Any]:
    if card.nics == card.name:
        own = load_hardware(card.name).collectives.inter
        return own.model_dump(mode="json", exclude_none=True)
    from_name = card.nics or card.like
    link = load_hardware(from_name).collectives.inter.at(card.nic_gbit_s)
    group = link.model_dump(mode="json", exclude_none=True) | {"rel_error": 0.3}
    for op in OPS:
        costs = [round(cost, 3) for cost in group[op]["us_per_mib"]]
        group[op] = group[op] | {"us_per_mib": costs}
    if card.message_us is not None:
        group["message_us"] = card.message_us
    group["provenance"] = _provenance(
        card,
        f"Curves of {from_name} scaled to {card.nic_gbit_s:g} Gbit/s a GPU, as such hosts are "
        f"sold.{card.nic_note}",
    )
    return group


def text_of(card: Card) -> str:
    """Return the text of a card's file, with the ranges and errors of the shipped one."""
    head = (
        f"# {card.title}\n# Written by `python -m lab fit derive`: change the rules there, "
        "not the figures here.\n"
    )
    text = head + yaml.dump(derive(card), Dumper=FlowLists, sort_keys=False, width=96)
    if card.name not in list_hardware():
        return text
    return with_facts(text, GROUP_NAMES, Facts.stated(load_hardware(card.name)))


def run(folder: Path) -> Iterator[str]:
    """Write the derived profiles that are missing or differ in a folder; yield their files."""
    for card in CARDS:
        path, text = folder / f"{card.name}.yaml", text_of(card)
        present = path.is_file() and parse_hardware(path.read_text(encoding="utf-8"), card.name)
        if present != parse_hardware(text, card.name):
            path.write_text(text, encoding="utf-8")
            yield f"wrote {path}"
