"""Computed figures of shipped profiles, written into their files: ranges, rows and errors.

The rest of a file is written by hand, with reasons beside it, or by `lab.fit.derive`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lab.fit.cards import CARDS
from lab.fit.links import gpu_fits, held_out_errors, rows_behind
from lab.fit.profile_text import set_key
from lab.statistics import grouped
from lab.suites import SUITES, ComparedRow, Summary
from lab.validate.collectives import ACROSS_LARGE, ACROSS_SMALL, WITHIN_LARGE, WITHIN_MEDIUM
from lab.validate.dlrm_published import FUSED, UNFUSED
from lab.validate.gemm import COLD, FP8, WARM, by_split, read_gemm
from lab.validate.mlperf import LATER, NEVER, by_configuration
from predictor.csv_rows import skipped_lines
from predictor.hardware.loader import list_hardware, load_hardware
from predictor.hardware.schema import HardwareProfile, KnownError
from shardopt.calibrate.products import GemmRows
from shardopt.files import atomic_write_text

Ranges = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Facts:
    """Computed figures of one profile.

    Args:
        groups: group -> figures of its `Provenance`: ``n``, ``range`` and ``error``.
        iterations: errors of whole iterations.
    """

    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    iterations: tuple[KnownError, ...] = ()

    @classmethod
    def stated(cls, profile: HardwareProfile) -> Facts:
        stated = {name: dict(group.provenance) for name, group in profile.groups.items()}
        return cls(stated, profile.known_error)

    def of_group(self, name: str) -> dict[str, Any]:
        """Return the keys of a group's ``provenance`` as plain data; None for a missing key."""
        stated = self.groups.get(name, {})
        error, spans = stated.get("error"), stated.get("range", {})
        return {
            "n": stated.get("n"),
            "range": {quantity: [*map(_whole, span)] for quantity, span in spans.items()} or None,
            "error": None if error is None else error.model_dump(exclude_none=True),
        }

    def of_profile(self) -> list[dict[str, Any]]:
        """Return the profile's ``known_error`` as plain data."""
        return [error.model_dump(exclude_none=True) for error in self.iterations]


def _whole(value: float) -> float:
    return int(value) if value == int(value) else float(f"{value:.6g}")


def with_facts(text: str, groups: Sequence[str], facts: Facts) -> str:
    """Replace the figures in the text of a profile.

    Args:
        groups: groups to change; others keep their figures, and so do groups that the text takes
            from a base.
    """
    data = yaml.safe_load(text)
    if facts.iterations or "known_error" in data:
        text = set_key(text, ["known_error"], facts.of_profile(), after="sms")
    for name in groups:
        stated = data
        path = [*name.split("."), "provenance"]
        for key in path:
            stated = stated.get(key, {})
        if not stated:
            continue
        for key, value in facts.of_group(name).items():
            if stated.get(key) != value:
                text = set_key(text, [*path, key], value)
    return text


INTRA = "collectives.intra"
INTER = "collectives.inter"
FITTED = "lab.fit.links"
GEMM_FITS = {
    "a100-40gb": "NVIDIA A100-PCIE-40GB",
    "a100-80gb": "NVIDIA A100-PCIE-40GB",
    "h100-sxm": "NVIDIA A100-PCIE-40GB",
    "h200-sxm": "NVIDIA A100-PCIE-40GB",
    "b200": "NVIDIA A100-PCIE-40GB",
    "v100-32gb": "Tesla V100-PCIE-32GB",
    "p100-pcie-16gb": "Tesla P100-PCIE-16GB",
}
"""Profile -> device whose rows gave its tiles, prologue and floors; other cards are `Card.like`."""
GEMM_FITTED = ("a100-40gb", "a100-80gb", "v100-32gb", "p100-pcie-16gb")
"""Profiles whose rate is fitted to those rows too, not a share of the datasheet's."""
TRAIN = "train"
FEWEST_LINKS = 8
"""Least number of held-out rows for an error."""
SAME_LINKS = {"h200-sxm": "h100-sxm", "b300": "b200"}
"""Profile -> the one with the same NVLink, whose rows give its error."""
HELD_OUT = {
    INTRA: ("held out, from 1 MiB within a domain", (WITHIN_LARGE, WITHIN_MEDIUM)),
    INTER: ("held out, across hosts", (ACROSS_LARGE, ACROSS_SMALL)),
}
"""Group -> the rows of the suite of collectives that give its error."""


WRITTEN = ("gemm", INTRA, INTER)
"""Groups whose figures are computed here; those of calibrated ones are with their rows."""


def computed(folder: Path) -> dict[str, Facts]:
    """Compute the figures of every shipped profile that was not calibrated, by name.

    Raises:
        InputError: a table in ``folder`` is missing or cannot be read.
    """
    cards = {card.name: card for card in CARDS}
    gemm, iterations = gemm_errors(folder), iteration_errors(folder)
    gemm_rows = by_split(read_gemm(folder))
    shapes, fits = gemm_ranges(gemm_rows), gpu_fits(folder)
    links, past_nics = link_errors(folder), rows_behind(folder)
    facts = {}
    for name in list_hardware():
        card = cards.get(name)
        if load_hardware(name).inline or (card is None and name not in GEMM_FITS):
            continue
        linked = card.link if card else name
        device = GEMM_FITS.get(name) or GEMM_FITS[card.like if card else name]
        groups: dict[str, dict[str, Any]] = {group: {} for group in WRITTEN}
        for group, error in {"gemm": gemm.get(name), **links.get(name, {})}.items():
            groups[group]["error"] = error
        groups["gemm"]["range"] = shapes[device]
        if linked is not None:
            groups[INTRA]["range"] = fits[linked].ranges
        if name in fits:
            groups[INTRA]["error"] = collective_error(folder, name)
            groups[INTRA]["n"] = len(fits[name].rows.ranks)
        if name in past_nics:
            groups[INTER]["n"] = past_nics[name]
        if name in GEMM_FITTED:
            groups["gemm"]["n"] = len(gemm_rows[GEMM_FITS[name], TRAIN].m)
        facts[name] = Facts(groups, tuple(iterations.get(name, ())))
    return facts


def _by_profile(rows: Sequence[ComparedRow]) -> dict[str, list[ComparedRow]]:
    """Group the rows by the profile that predicted them."""
    return grouped(rows, lambda row: str(row.name["profile"]))


def gemm_ranges(tables: Mapping[tuple[str, str], GemmRows]) -> dict[str, Ranges]:
    """Return device -> ranges of m, n and k over its train and test rows."""
    ranges: dict[str, Ranges] = {}
    for device, device_tables in grouped(tables.items(), lambda item: item[0][0]).items():
        sides = {
            s: np.concatenate([getattr(table, s) for _, table in device_tables]) for s in "mnk"
        }
        ranges[device] = {
            s: (float(values.min()), float(values.max())) for s, values in sides.items()
        }
    return ranges


def gemm_errors(folder: Path) -> dict[str, KnownError]:
    """Return profile -> error on the held-out rows of its device.

    Leaves out fp8, whose times are doubtful, and cold operands, which are rare in training.
    """
    report = SUITES["gemm"].run(folder)
    listed = [row for row in report.listed if row.part not in (FP8, COLD)]
    error_of = {}
    for name, rows in _by_profile(listed).items():
        linear = [str(row.name["device"]) for row in rows if "device" in row.name]
        products = [row.family for row in rows if "device" not in row.name and row.part != WARM]
        which = []
        if any(row.part == WARM for row in rows):
            which.append("bf16 with warm operands (aiconfigurator)")
        if linear:
            devices = " and ".join(dict.fromkeys(linear))
            which.append(f"fp32 test rows of {devices} (NeuSight)")
        if products:
            which.append(f"{' and '.join(dict.fromkeys(products))} (XLA)")
        error_of[name] = _known(report.suite, "; ".join(which), Summary.of(rows))
    return error_of


def link_errors(folder: Path) -> dict[str, dict[str, KnownError]]:
    """Return profile -> group of links -> error on rows held out."""
    report = SUITES["collectives"].run(folder)
    error_of: dict[str, dict[str, KnownError]] = defaultdict(dict)
    for group, (description, parts) in HELD_OUT.items():
        part_rows = [row for row in report.listed if row.part in parts]
        for name, rows in _by_profile(part_rows).items():
            if len(rows) >= FEWEST_LINKS:
                error_of[name][group] = _known(report.suite, description, Summary.of(rows))
    for name, like in SAME_LINKS.items():
        error = error_of[like][INTRA]
        which = f"{error.rows}, of {like}, whose NVLink is the same"
        error_of[name][INTRA] = error.model_copy(update={"rows": which})
    return dict(error_of)


def collective_error(folder: Path, name: str) -> KnownError:
    """Return the error of a profile's curve rule, fitted to every second size, at the others."""
    errors = np.concatenate([error for *_, error in held_out_errors(folder, name)])
    which = "sizes left out of the tables behind the curves"
    return _known(FITTED, which, Summary.of_errors(errors.tolist()))


def iteration_errors(folder: Path) -> dict[str, list[KnownError]]:
    """Return profile -> errors of the suites of whole iterations that test it, TorchRec's first."""
    errors: dict[str, list[KnownError]] = defaultdict(list)
    for suite, runtime, words, listed in _iterations(folder):
        for name, rows in _by_profile(listed).items():
            error = _known(suite, words, Summary.of(rows))
            errors[name].append(error.model_copy(update={"runtime": runtime}))
    return dict(errors)


def _iterations(folder: Path) -> Iterator[tuple[str, str, str, Sequence[ComparedRow]]]:
    """Yield suite, software of the iterations, description of the rows, and the rows."""
    p4d = SUITES["torchrec-p4d"].run(folder)
    yield p4d.suite, "TorchRec", p4d.headline, p4d.counted
    examples = SUITES["dlrm-published"].run(folder)
    single = [row for row in examples.rows if row.part in (UNFUSED, FUSED)]
    yield examples.suite, "DeepLearningExamples", "fp32 and TF32", single
    mlperf = SUITES["mlperf-dlrm"].run(folder)
    # systems that repeat a configuration of a fitted family count once
    later = by_configuration(mlperf.parts.get(LATER, ()))
    words = "later rounds of fitted families, one row a configuration"
    yield mlperf.suite, "HugeCTR", words, later
    yield mlperf.suite, "HugeCTR", NEVER, mlperf.parts.get(NEVER, ())


def _known(suite: str, which: str, summary: Summary) -> KnownError:
    mean, middle = _figure(summary.mape), _figure(summary.geomean)
    return KnownError(suite=suite, rows=which, n=summary.n, mean=mean, geomean=middle)


def _figure(value: float) -> float:
    """Round to four digits, more than are ever shown."""
    return float(f"{value:.4g}")


def run(data: Path, profiles: Path) -> Iterator[str]:
    """Write the figures into a folder of profiles; yield left-out rows and changed profiles."""
    changed = []
    for name, facts in computed(data).items():
        path = profiles / f"{name}.yaml"
        before = path.read_text(encoding="utf-8")
        after = with_facts(before, WRITTEN, facts)
        if after != before:
            atomic_write_text(path, after)
            changed.append(name)
    problems = [text for fit in gpu_fits(data).values() for text in fit.problems]
    yield from skipped_lines([*dict.fromkeys(problems), *read_gemm(data).problems])
    yield f"changed: {', '.join(changed) or 'none'}"
