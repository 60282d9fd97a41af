"""Cards that no public table measures, as cards.yaml describes them after their datasheets.

`lab.fit.derive` makes their profiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from predictor.errors import InputError
from predictor.hardware.schema import ProvenanceKind

SHEET = "NVIDIA datasheet"


@dataclass(frozen=True)
class Card:
    """Figures of a datasheet, and the profiles whose measured groups replace unmeasured ones.

    Args:
        like: profile whose fitted shapes (tiles, floors, embedding law) are used.
        peak_gb_s: memory bandwidth.
        tflops: dense peaks by data type.
        pcie: generation of the slot.
        link: profile whose NVLink curves hold; None for cards joined by PCIe; its own name where
            its file holds its own curves (`lab.fit.links`).
        switched: a switch joins the cards; it adds up all-reduces where it can.
        nics: profile whose curves between hosts hold, if not ``like``; its own name as above.
        message_us: time of a host's thread for a message over a NIC, where that decides.
        link_factor: bandwidth of that NVLink over the card's own.
        l2_gb_s: L2 bandwidth, where it was measured on the same chip.
        gemm: constants fitted for this device, with their source.
        tensor_floor_us: shortest product on tensor cores, where it was measured.
        gemm_error, gemm_note: assumed relative error, and the evidence of rows not fitted.
        nic_gbit_s: as such hosts are sold.
        gddr: graphics memory instead of HBM.
        host: profile of a GPU whose hosts are of the same years; None: ``like``.
        sheet: source document of the figures.
        kind: provenance of the groups; ``not validated`` where no vendor's document has figures.
    """

    name: str
    title: str
    like: str
    hbm_gib: float
    peak_gb_s: float
    sms: int
    boost_ghz: float
    l2_mib: float
    tflops: Mapping[str, float]
    pcie: int
    nic_gbit_s: float
    link: str | None = None
    link_factor: float = 1.0
    link_note: str = ""
    switched: bool = True
    nics: str | None = None
    message_us: float | None = None
    nic_note: str = ""
    gpus_per_host: int = 8
    nvlink_domain: int = 8
    host_link_gb_s: float | None = None
    l2_gb_s: float | None = None
    gemm: Mapping[str, Any] = field(default_factory=dict)
    gemm_source: str = ""
    tensor_floor_us: float | None = None
    gemm_error: float = 0.2
    gemm_note: str = ""
    sheet: str = SHEET
    kind: ProvenanceKind = "derived"
    host: str | None = None
    gddr: bool = False


@dataclass(frozen=True)
class TensorSheet:
    """Datasheet of a card whose tensor-core kernels were measured."""

    sms: int
    boost_ghz: float
    tflops: Mapping[str, float]


_LISTED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
TENSOR_SHEETS = {name: TensorSheet(**sheet) for name, sheet in _LISTED["tensor_sheets"].items()}
"""Profile whose kernels other profiles use -> its datasheet."""


def read_card(keys: dict[str, Any]) -> Card:
    """Read one entry of the list.

    Raises:
        InputError: a key is missing or unknown.
    """
    try:
        return Card(**keys)
    except TypeError as error:
        allowed = ", ".join(key.name for key in fields(Card))
        raise InputError(
            f"lab/fit/cards.yaml: card {keys.get('name')!r}: "
            f"{str(error).removeprefix('Card.__init__() ')}; its keys are {allowed}"
        ) from None


CARDS = tuple(read_card(keys) for keys in _LISTED["cards"])
