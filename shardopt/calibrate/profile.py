"""Makes a hardware profile of the rows of a calibration, with a verdict on its quality.

Reads rows, and measures nothing. Why: docs/decisions/0022-calibration.md.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import yaml

from predictor.cost.collectives import OPS
from predictor.cost.posterior import posterior
from predictor.errors import InputError
from predictor.hardware.learned import HOST, Evidence, Learned
from predictor.hardware.schema import HardwareProfile, Verdict
from predictor.learn import evidence
from predictor.model.plan import ComputeKernel, Shard, ShardingPlan, ShardingType, TablePlan
from predictor.model.topology import Topology
from predictor.model.workload import Constraints, DenseTimes, MeasuredDense, Workload
from predictor.trace.phases import Measured
from shardopt.calibrate import Group, families, gpu_lookups, host, lookups, moves, products
from shardopt.calibrate.collectives import fit_links, issue_us
from shardopt.calibrate.fitting import (
    FEWEST,
    CalibratedProfile,
    HeldOut,
    Wiring,
    kept_words,
    source_on,
)
from shardopt.calibrate.points import REFERENCE_KERNELS, TOGETHER
from shardopt.calibrate.rows import PASSES, Accepted, Measurement, Origin, accept

MOST_REFUSED = 0.05
"""Largest share of refused rows in a quiet calibration, among rows of one rank and of all ranks."""
MOST_DRIFT = 0.10
"""Largest relative drift of the reference kernels in a quiet calibration."""
BUSY = 0.5
"""Load average of other work above which times are disturbed."""
MOST_WORSE = 0.1
"""Share by which held-out errors may exceed those of the shipped profile."""
_FOUND = re.compile(re.escape(source_on("{machine}")).replace(re.escape("{machine}"), "(.+?)"))


def build_profile(
    rows: Sequence[Measurement],
    origin: Origin,
    base: HardwareProfile,
    name: str,
    ranks: int,
    memory_gib: float,
    link_gbit_s: float | None = None,
    hosts: int = 1,
    only: Group | None = None,
    missing: int = 0,
    model: Workload | None = None,
) -> CalibratedProfile:
    """Build the profile of the rows; a family with too few keeps the base's constants.

    Args:
        base: its constants stay where nothing was measured; ranks are CPUs or GPUs as in it.
        memory_gib: main memory of the whole machine; its ranks share it.
        link_gbit_s: of the link between hosts of one rank, to fit its rows; None: rows of ranks
            within the machine.
        hosts: number of hosts.
        only: the one group whose rows are fitted; None: all.
        missing: number of points that there was no time for.
        model: its tables are priced as measured.

    Raises:
        InputError: there are no rows.
    """
    wiring = Wiring(ranks, hosts, link_gbit_s)
    used = [row for row in rows if families.needs(only, row.point.family)]
    accepted = accept(row for row in used if _of_wiring(row, wiring))
    draft = CalibratedProfile(accepted.rows, origin, wiring, base, base)
    draft = _fit_cpu(draft) if base.inline else _fit_gpu(draft)
    if not accepted.rows:
        raise InputError("no point is measured yet; measure for longer")
    draft = _judged(draft, accepted, missing, only)
    over = "" if link_gbit_s is None else f" on hosts joined by {link_gbit_s:g} Gbit/s"
    over = f" on {hosts} hosts" if hosts > 1 else over
    shape: dict[str, Any] = {
        "name": name,
        "title": f"{origin.machine}, {ranks} ranks{over}, measured by shardopt calibrate",
        "known_error": (),  # of whole iterations that the base predicted
    }
    if only is not None:
        groups = draft.profile.groups
        changed = {name for name in groups if groups[name] != base.groups[name]}
        draft = replace(draft, groups=draft.groups | changed)
    if base.inline:
        local = wiring.local
        share = round(memory_gib / (local if hosts > 1 else ranks), 2)
        shape |= {"runtime": rows[0].runtime.value, "hbm_gib": share, "ddr_gib": share}
        shape |= {"gpus_per_host": local, "nvlink_domain": local}
    draft = draft.update(**shape)
    return draft if model is None else _with_tables(draft, model)


def _with_tables(draft: CalibratedProfile, model: Workload) -> CalibratedProfile:
    """Add factors for the measured lookups of the model's own tables.

    The lookups are evidence like that of a trace. They give a factor for each table and width,
    shrunk to the kernel model by the errors that the profile states.
    """
    rows = [
        row
        for part in PASSES
        for row in draft.of("model_lookup", part)
        if row.point.params["model_sha"] == model.sha256
    ]
    pieces = [piece for row in rows for piece in _evidence(draft.profile, model, row)]
    if not pieces:
        return draft
    factors, errors = posterior(pieces, draft.profile, ONE_RANK)
    learned = Learned(
        model=model.name,
        plans=("each table alone",),
        machine=draft.origin.machine,
        steps=len(rows),
        date=max(row.date for row in rows)[:10],
        factors=factors,
        errors=errors,
        evidence=tuple(pieces),
    )
    count = len({row.point.params["table"] for row in rows})
    note = f"{count} of {len(model.tables)} tables of {model.name} are priced as measured"
    return replace(draft.update(learned=learned), notes=(*draft.notes, note))


ONE_RANK = Topology.uniform(1, 1, hbm_bytes=2**62, ddr_bytes=2**62)


def _evidence(hardware: HardwareProfile, model: Workload, row: Measurement) -> list[Evidence]:
    """Compare a measured lookup with its prediction; empty if the profile predicts none."""
    p, key = row.point.params, row.point.params["table"]
    table = replace(model.tables[model.keys.index(key)], constraints=Constraints())
    no_dense = MeasuredDense(DenseTimes(1, 0.0, 0.0, 0.0, 0.0))
    alone = Workload(model.name, p["batch_size"] * p["ranks"], (table,), no_dense)
    shard = Shard(0, (0, 0), (table.num_embeddings, table.embedding_dim))
    whole = TablePlan(ShardingType.TABLE_WISE, ComputeKernel.FUSED, (shard,))
    spread = (row.p75_us - row.p25_us) / 1.35 / row.median_us / math.sqrt(row.n)
    name = f"lookups.{row.part} {table.module}.{ShardingType.TABLE_WISE.short}"
    measured = [Measured(name, 0, row.median_us * 1e-3, spread)]
    plan = ShardingPlan({table.name: whole}, 1, 1)
    matched, _ = evidence(alone, ONE_RANK, hardware, plan, measured)

    def named(item: Evidence) -> Evidence:
        """Name parts by the table's key in the whole model; host time includes the clock."""
        own = f"/{alone.keys[0]}"
        parts = {
            part.replace(own, f"/{key}"): ms for part, ms in item.parts_ms.items() if part != HOST
        }
        return item.model_copy(update={"parts_ms": parts, "what": f"{row.part} of {key}"})

    return [named(item) for item in matched]


def _of_wiring(row: Measurement, wiring: Wiring) -> bool:
    """Return True for rows of this wiring, or of none: other links have other curves."""
    family, params = row.point.family, row.point.params
    if family not in TOGETHER:
        return True
    if params.get("link_gbit_s") != wiring.link_gbit_s:
        return False
    within_a_host = family == "collective" and wiring.hosts > 1 and "hosts" not in params
    return within_a_host or params.get("hosts", 1) == wiring.hosts


def _fit_cpu(draft: CalibratedProfile) -> CalibratedProfile:
    """Fit all families: bandwidth before the products, the host before the collectives.

    Products use the bandwidth; iterations of the host give the latency of collectives.
    """
    for fit in (moves.fit_cpu, products.fit_cpu, lookups.fit_cpu):
        draft = fit(draft)
    draft, latency_us = host.fit_cpu(draft)
    # ops of the host that are fitted on iterations include the issue
    issued = 0.0 if "overheads" in draft.groups else issue_us(draft.of("collective"))
    return fit_links(draft, issued, latency_us, holds_issue=latency_us is None)


def _fit_gpu(draft: CalibratedProfile) -> CalibratedProfile:
    """Fit all families: bandwidth first, which all other kernels use; host ops last.

    Events of the device do not show the host's issue of a collective. Kernel constants of the base
    may not suit another bandwidth: if a family is then predicted worse than by the base, and is not
    with the base's bandwidth, that bandwidth stays too.
    """
    begun = host.fit_device(_less_clock(draft))
    draft = _fit_kernels(begun)
    worse = [name for name, mine in draft.errors.items() if mine.mape > draft.shipped[name].mape]
    if worse and draft.profile.memory.hbm_gb_s != begun.profile.memory.hbm_gb_s:
        streams = [row for row in begun.rows if row.point.family != "streaming"]
        redone = _fit_kernels(replace(begun, rows=streams))
        mended = [n for n in worse if redone.errors[n].mape <= redone.shipped[n].mape]
        if mended:
            note = f"hbm_gb_s: the value of {draft.base.name} stays, for {', '.join(mended)}"
            draft = replace(redone, rows=begun.rows, notes=(*redone.notes, note))
    issued = issue_us(draft.of("collective")) or draft.profile.overheads.collective_us
    return host.fit_gpu(fit_links(draft, issued))


def _less_clock(draft: CalibratedProfile) -> CalibratedProfile:
    """Subtract the time that events add to a kernel, which a tiny kernel shows."""
    clock = [row for row in draft.of("clock") if "kernel_us" in row.facts]
    if not clock:
        return draft
    beyond = max(0.0, clock[0].median_us - clock[0].facts["kernel_us"])
    rows = [
        row
        if row.point.family in (*TOGETHER, "host", "clock")
        else replace(row, median_us=max(row.median_us - beyond, clock[0].facts["kernel_us"]))
        for row in draft.rows
    ]
    note = f"{beyond:.1f} us of every kernel's time are the clock's"
    return replace(draft, rows=rows, notes=(*draft.notes, note))


def _fit_kernels(draft: CalibratedProfile) -> CalibratedProfile:
    for fit in (moves.fit_gpu, products.fit_gpu, gpu_lookups.fit_gpu):
        draft = fit(draft)
    return draft


def profile_text(calibrated: CalibratedProfile, base: str | None = None) -> str:
    """Write the profile as YAML, figures to five digits.

    Args:
        base: name of the profile to take unmeasured groups from; None writes all groups.
    """
    data = calibrated.profile.model_dump(mode="json", by_alias=True, exclude_none=True)
    if base is not None:
        own = ["name", "title", "hbm_gib", "ddr_gib", "gpus_per_host", "nvlink_domain"]
        own += ["runtime", "sms", "verdict"]
        entries = {"schema": data["schema"], "base": base, **{k: data[k] for k in own if k in data}}
        entries |= {key: value for key, value in data.items() if key in calibrated.groups}
        links = data["collectives"].items()
        wires = {key: value for key, value in links if f"collectives.{key}" in calibrated.groups}
        data = entries | ({"collectives": wires} if wires else {})
    head = "# Written by shardopt calibrate; keys carry their unit.\n"
    return head + yaml.safe_dump(_rounded(data), sort_keys=False, allow_unicode=True, width=98)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _judged(
    draft: CalibratedProfile, accepted: Accepted, missing: int, only: Group | None
) -> CalibratedProfile:
    """Add the verdict, and notes on drift, failed points and refused rows."""
    notes, drift = [*draft.notes], {}
    for kernel in REFERENCE_KERNELS:
        rows = (r for r in draft.of("reference") if r.point.params["kernel"] == kernel)
        times = [row.median_us for row in rows]
        if len(times) > 1:
            drift[kernel] = max(times) / min(times) - 1
            notes.append(f"reference {kernel} moved by {drift[kernel]:.1%} meanwhile")
    for family in sorted({row.point.family for row in accepted.refused} - set(TOGETHER)):
        fit_rows = sum(row.point.family == family and not row.point.test for row in draft.rows)
        if fit_rows < FEWEST:
            notes.append(kept_words(family))
    weaker = sorted(set(draft.profile.groups) - draft.groups - {"memory"})
    if weaker and only is None:
        notes.append(f"weaker, as in {draft.base.name}: {', '.join(weaker)}")
    for reason, count in Counter(row.failure for row in accepted.failed).items():
        notes.append(f"{count} points failed: {reason}")
    refused = len(accepted.refused)
    notes.append(f"{accepted.repeated} rows were measured again, {refused} are refused")
    ranks = draft.wiring.ranks // draft.wiring.hosts
    verdict = judge(accepted, drift, draft.errors, draft.shipped, ranks, missing)
    return replace(draft.update(verdict=verdict), notes=tuple(notes))


def judge(
    accepted: Accepted,
    drift: Mapping[str, float],
    errors: Mapping[str, HeldOut],
    shipped: Mapping[str, HeldOut],
    ranks_of_host: int,
    missing: int = 0,
) -> Verdict:
    """Return the verdict, with the reasons against a better one.

    Args:
        drift: relative drift of each reference kernel.
        errors: of each family on held-out rows.
        shipped: errors of the profile that the calibration started from, on the same rows. Kernels
            and collectives count apart: many good rows of one would hide bad rows of the other.
        ranks_of_host: ranks whose own work is part of the load.
        missing: number of points that there was no time for.
    """
    worse, doubts = [], []
    for kind, together in (("kernels", False), ("collectives", True)):
        names = [name for name in shipped if name.startswith(OPS) == together]
        means = ([of_all[n].mape for n in names if of_all[n].n] for of_all in (errors, shipped))
        mine, theirs = (statistics.fmean(values) if values else 0.0 for values in means)
        if mine > (1 + MOST_WORSE) * theirs:
            worse.append(f"held-out error of {kind} {mine:.1%}, of the shipped one {theirs:.1%}")
    for who, together, ranks in (("one rank", False, 1), ("all ranks", True, ranks_of_host)):
        good, bad = (
            [row.load for row in rows if (row.point.family in TOGETHER) == together]
            for rows in (accepted.rows, accepted.refused)
        )
        if len(bad) > MOST_REFUSED * len(good + bad):
            doubts.append(f"{len(bad)} of {len(good + bad)} rows of {who} were refused")
        other = statistics.median(good + bad or [0.0]) - ranks
        if other > BUSY:
            doubts.append(f"load average of other work {other:.1f} while {who} measured")
    if drift and max(drift.values()) > MOST_DRIFT:
        kernel = max(drift, key=lambda name: drift[name])
        doubts.append(f"reference {kernel} moved by {drift[kernel]:.0%}")
    if missing:
        doubts.append(f"{missing} points were not measured")
    if worse:
        return Verdict(quality="worse than the shipped one", why=(*worse, *doubts))
    return Verdict(quality="usable" if doubts else "quiet", why=tuple(doubts))


def measured_on(profile: HardwareProfile) -> tuple[str, ...]:
    """Return the machines that measured a profile's groups, sorted."""
    matches = (_FOUND.match(group.provenance.source) for group in profile.groups.values())
    return tuple(sorted({match.group(1) for match in matches if match}))


def elsewhere_notes(profile: HardwareProfile, machine: str, runtime: str) -> list[str]:
    """Return notes if a profile was measured on another machine, or in another runtime."""
    machines, notes = [other for other in measured_on(profile) if other != machine], []
    if machines:
        notes.append(
            f"hardware {profile.name} was measured on {'; '.join(machines)}, and this is "
            f"{machine}: predicted and measured times will differ by what the machines do; "
            "measure this one with shardopt calibrate"
        )
    if profile.runtime not in (None, runtime):
        notes.append(
            f"hardware {profile.name} was measured in the {profile.runtime} runtime, and these "
            f"ranks run in the {runtime} one: collectives and host code take other times; "
            f"calibrate in the {runtime} runtime"
        )
    return notes
