"""From the rows of a calibration to the file of a hardware profile, and what it is worth.

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
from predictor.model.workload import Constraints, MeasuredDense, Workload
from predictor.trace.phases import Measured
from shardopt.calibrate import FAMILIES, Group, gpu_lookups, host, lookups, moves, products
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
"""Share of the rows of a quiet calibration that are refused, of those that one rank measures and
of those that all measure."""
MOST_DRIFT = 0.10
"""How far the reference kernels of a quiet calibration move."""
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
    """The profile that the rows give; a family with too few keeps the base's constants.

    Args:
        base: whose constants stay where nothing was measured; says whether ranks are CPUs or GPUs.
        memory_gib: main memory of the whole machine; its ranks share it.
        link_gbit_s: of the link between hosts of one rank, whose rows are fitted; None: those of
            ranks within the machine.
        hosts: that the ranks lie on.
        only: the one group whose rows are fitted, whatever others there are; None: all.
        missing: points that there was no time for.
        model: whose own tables are priced as measured.

    Raises:
        InputError: there are no rows.
    """
    wiring = Wiring(ranks, hosts, link_gbit_s)
    used = [row for row in rows if only is None or row.point.family in FAMILIES[only]]
    found = accept(row for row in used if _of_wiring(row, wiring))
    made = CalibratedProfile(found.rows, origin, wiring, base, base)
    made = _fit_cpu(made) if base.inline else _fit_gpu(made)
    if not found.rows:
        raise InputError("no point is measured yet; measure for longer")
    made = _judged(made, found, missing, only)
    over = "" if link_gbit_s is None else f" on hosts joined by {link_gbit_s:g} Gbit/s"
    over = f" on {hosts} hosts" if hosts > 1 else over
    shape: dict[str, Any] = {
        "name": name,
        "title": f"{origin.machine}, {ranks} ranks{over}, measured by shardopt calibrate",
        "known_error": (),  # of whole iterations that the base predicted
    }
    if only is not None:
        groups = made.profile.groups
        changed = {name for name in groups if groups[name] != base.groups[name]}
        made = replace(made, groups=made.groups | changed)
    if base.inline:
        local = wiring.local
        share = round(memory_gib / (local if hosts > 1 else ranks), 2)
        shape |= {"runtime": rows[0].runtime.value, "hbm_gib": share, "ddr_gib": share}
        shape |= {"gpus_per_host": local, "nvlink_domain": local}
    made = made.update(**shape)
    return made if model is None else _with_tables(made, model)


def _with_tables(made: CalibratedProfile, model: Workload) -> CalibratedProfile:
    """With what the lookups of the model's own tables take beside the kernel model.

    They are evidence like that of a trace: a factor for each table and width, shrunk to the kernel
    model by the errors that the profile states, and of what was not measured as near to it.
    """
    rows = [
        row
        for part in PASSES
        for row in made.of("model_lookup", part)
        if row.point.params["model_sha"] == model.sha256
    ]
    found = [one for row in rows for one in _evidence(made.profile, model, row)]
    if not found:
        return made
    factors, errors = posterior(found, made.profile, ONE_RANK)
    learned = Learned(
        model=model.name,
        plans=("each table alone",),
        machine=made.origin.machine,
        steps=len(rows),
        date=max(row.date for row in rows)[:10],
        factors=factors,
        errors=errors,
        evidence=tuple(found),
    )
    count = len({row.point.params["table"] for row in rows})
    note = f"{count} of {len(model.tables)} tables of {model.name} are priced as measured"
    return replace(made.update(learned=learned), notes=(*made.notes, note))


ONE_RANK = Topology.uniform(1, 1, hbm_bytes=2**62, ddr_bytes=2**62)


def _evidence(hardware: HardwareProfile, model: Workload, row: Measurement) -> list[Evidence]:
    """A measured lookup beside its prediction; none where the profile predicts none."""
    p, key = row.point.params, row.point.params["table"]
    table = replace(model.tables[model.keys.index(key)], constraints=Constraints())
    no_dense = MeasuredDense(1, 0.0, 0.0, 0.0, 0)
    alone = Workload(model.name, p["batch_size"] * p["ranks"], (table,), no_dense)
    shard = Shard(0, (0, 0), (table.num_embeddings, table.embedding_dim))
    whole = TablePlan(ShardingType.TABLE_WISE, ComputeKernel.FUSED, (shard,))
    spread = (row.p75_us - row.p25_us) / 1.35 / row.median_us / math.sqrt(row.n)
    what = f"lookups.{row.part} {table.module}.{ShardingType.TABLE_WISE.short}"
    measured = [Measured(what, 0, row.median_us * 1e-3, spread)]
    plan = ShardingPlan({table.name: whole}, 1, 1)
    matched, _ = evidence(alone, ONE_RANK, hardware, plan, measured)

    def named(found: Evidence) -> Evidence:
        """By the table's key among all of the model's; the clock is inside what the host does."""
        own = f"/{alone.keys[0]}"
        parts = {
            part.replace(own, f"/{key}"): ms for part, ms in found.parts_ms.items() if part != HOST
        }
        return found.model_copy(update={"parts_ms": parts, "what": f"{row.part} of {key}"})

    return [named(found) for found in matched]


def _of_wiring(row: Measurement, wiring: Wiring) -> bool:
    """Whether a row is of this wiring, where it is of any: other links have other curves."""
    family, params = row.point.family, row.point.params
    if family not in TOGETHER:
        return True
    if params.get("link_gbit_s") != wiring.link_gbit_s:
        return False
    within_a_host = family == "collective" and wiring.hosts > 1 and "hosts" not in params
    return within_a_host or params.get("hosts", 1) == wiring.hosts


def _fit_cpu(made: CalibratedProfile) -> CalibratedProfile:
    """Bandwidth first: products use it; the host before the collectives, whose latency it tells."""
    for fit in (moves.fit_cpu, products.fit_cpu, lookups.fit_cpu):
        made = fit(made)
    made, latency_us = host.fit_cpu(made)
    # ops of the host that are fitted on iterations have the issuing
    issued = 0.0 if "overheads" in made.groups else issue_us(made.of("collective"))
    return fit_links(made, issued, latency_us, holds_issue=latency_us is None)


def _fit_gpu(made: CalibratedProfile) -> CalibratedProfile:
    """Bandwidth first, which all other kernels use; host ops last, as they need the rest.

    Events of the device see nothing of the host's issuing a collective. Constants of kernels that
    stay are worth less over another bandwidth: where a family is then predicted worse than by the
    base, the bandwidth stays too.
    """
    begun = host.fit_device(_less_clock(made))
    made = _fit_kernels(begun)
    worse = [name for name, mine in made.errors.items() if mine.mape > made.shipped[name].mape]
    if worse and made.profile.memory.hbm_gb_s != begun.profile.memory.hbm_gb_s:
        streams = [row for row in begun.rows if row.point.family != "streaming"]
        kept = _fit_kernels(replace(begun, rows=streams))
        said = f"hbm_gb_s: the value of {made.base.name} stays, for {', '.join(worse)}"
        made = replace(kept, rows=begun.rows, notes=(*kept.notes, said))
    issued = issue_us(made.of("collective")) or made.profile.overheads.collective_us
    return host.fit_gpu(fit_links(made, issued))


def _less_clock(made: CalibratedProfile) -> CalibratedProfile:
    """With times of kernels alone: events around a kernel see more, which a tiny kernel tells."""
    known = [row for row in made.of("clock") if "kernel_us" in row.facts]
    if not known:
        return made
    beyond = max(0.0, known[0].median_us - known[0].facts["kernel_us"])
    rows = [
        row
        if row.point.family in (*TOGETHER, "host", "clock")
        else replace(row, median_us=max(row.median_us - beyond, known[0].facts["kernel_us"]))
        for row in made.rows
    ]
    note = f"{beyond:.1f} us of every kernel's time are the clock's"
    return replace(made, rows=rows, notes=(*made.notes, note))


def _fit_kernels(made: CalibratedProfile) -> CalibratedProfile:
    for fit in (moves.fit_gpu, products.fit_gpu, gpu_lookups.fit_gpu):
        made = fit(made)
    return made


def profile_text(found: CalibratedProfile, base: str | None = None) -> str:
    """The profile as YAML, figures to five digits.

    Args:
        base: name of the profile that has the groups which were not measured; None writes them all.
    """
    data = found.profile.model_dump(mode="json", by_alias=True, exclude_none=True)
    if base is not None:
        own = ["name", "title", "hbm_gib", "ddr_gib", "gpus_per_host", "nvlink_domain"]
        own += ["runtime", "sms", "verdict"]
        kept = {"schema": data["schema"], "base": base, **{k: data[k] for k in own if k in data}}
        kept |= {key: value for key, value in data.items() if key in found.groups}
        links = data["collectives"].items()
        wires = {key: value for key, value in links if f"collectives.{key}" in found.groups}
        data = kept | ({"collectives": wires} if wires else {})
    head = "# Written by shardopt calibrate; keys carry their unit.\n"
    return head + yaml.safe_dump(_rounded(data), sort_keys=False, allow_unicode=True, width=98)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def _judged(
    made: CalibratedProfile, found: Accepted, missing: int, only: Group | None
) -> CalibratedProfile:
    """With the verdict, and how the reference kernels changed from the start to the end."""
    notes, drift = [*made.notes], {}
    for kernel in REFERENCE_KERNELS:
        rows = (r for r in made.of("reference") if r.point.params["kernel"] == kernel)
        times = [row.median_us for row in rows]
        if len(times) > 1:
            drift[kernel] = max(times) / min(times) - 1
            notes.append(f"reference {kernel} moved by {drift[kernel]:.1%} meanwhile")
    for family in sorted({row.point.family for row in found.refused} - set(TOGETHER)):
        left = sum(row.point.family == family and not row.point.test for row in made.rows)
        if left < FEWEST:
            notes.append(kept_words(family))
    weaker = sorted(set(made.profile.groups) - made.groups - {"memory"})
    if weaker and only is None:
        notes.append(f"weaker, as in {made.base.name}: {', '.join(weaker)}")
    for said, count in Counter(row.failure for row in found.failed).items():
        notes.append(f"{count} points failed: {said}")
    notes.append(f"{found.repeated} rows were measured again, {len(found.refused)} are refused")
    ranks = made.wiring.ranks // made.wiring.hosts
    verdict = judge(found, drift, made.errors, made.shipped, ranks, missing)
    return replace(made.update(verdict=verdict), notes=tuple(notes))


def judge(
    accepted: Accepted,
    drift: Mapping[str, float],
    errors: Mapping[str, HeldOut],
    shipped: Mapping[str, HeldOut],
    ranks_of_host: int,
    missing: int = 0,
) -> Verdict:
    """The verdict, with what stands against a better one.

    Args:
        drift: by how much each reference kernel moved meanwhile, as a share.
        errors: of each family on rows held out.
        shipped: of the profile that the calibration started from, on the same rows. Kernels and
            collectives count apart: many good rows of the one would hide bad ones of the other.
        ranks_of_host: whose own work is part of the load.
        missing: points that there was no time for.
    """
    worse, doubts = [], []
    for what, together in (("kernels", False), ("collectives", True)):
        names = [name for name in shipped if name.startswith(OPS) == together]
        known = ([of[name].mape for name in names if of[name].n] for of in (errors, shipped))
        mine, theirs = (statistics.fmean(found) if found else 0.0 for found in known)
        if mine > (1 + MOST_WORSE) * theirs:
            worse.append(f"held-out error of {what} {mine:.1%}, of the shipped one {theirs:.1%}")
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
    """Machines that measured a profile's groups, sorted; none where nothing says so."""
    found = (_FOUND.match(group.provenance.source) for group in profile.groups.values())
    return tuple(sorted({match.group(1) for match in found if match}))


def elsewhere_notes(profile: HardwareProfile, machine: str, runtime: str) -> list[str]:
    """What there is to say where a profile was measured on another machine, or in another runtime
    than ``runtime``."""
    others, notes = [other for other in measured_on(profile) if other != machine], []
    if others:
        notes.append(
            f"hardware {profile.name} was measured on {'; '.join(others)}, and this is {machine}: "
            "predicted and measured times will differ by what the machines do; "
            "measure this one with shardopt calibrate"
        )
    if profile.runtime not in (None, runtime):
        notes.append(
            f"hardware {profile.name} was measured in the {profile.runtime} runtime, and these "
            f"ranks run in the {runtime} one: collectives and host code take other times; "
            f"calibrate in the {runtime} runtime"
        )
    return notes
