"""Cards that no public table measures, as their datasheets describe them.

`lab.fit.derive` makes their profiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SHEET = "NVIDIA datasheet"


@dataclass(frozen=True)
class Card:
    """What a datasheet says, and whose measured groups stand in.

    Args:
        like: profile whose fitted shapes (tiles, floors, embedding law) are taken over.
        peak_gb_s: memory bandwidth.
        tflops: dense peaks by data type.
        pcie: generation of the slot.
        link: profile whose NVLink curves hold, None for cards that talk over PCIe; its own name
            where its file holds curves of its own (`lab.fit.links`).
        switched: whether a switch joins the cards, which then adds up all-reduces where it can.
        nics: profile whose curves between hosts hold, if not ``like``; its own name as above.
        all_to_all_factor: on what bytes of an all-to-all cost between hosts.
        link_factor: bandwidth of that NVLink over the card's own.
        l2_gb_s: where it was measured on the same chip.
        gemm: constants fitted for this very device, with their source.
        gemm_error, gemm_note: assumed relative error, and what rows that were not fitted show.
        nic_gbit_s: as such hosts are sold.
        gddr: graphics memory instead of HBM.
        host: profile of a GPU whose hosts are of the same years; None: ``like``.
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
    all_to_all_factor: float = 1.0
    nic_note: str = ""
    gpus_per_host: int = 8
    nvlink_domain: int = 8
    host_link_gb_s: float | None = None
    l2_gb_s: float | None = None
    gemm: Mapping[str, Any] = field(default_factory=dict)
    gemm_source: str = ""
    gemm_error: float = 0.2
    gemm_note: str = ""
    sheet: str = SHEET
    host: str | None = None
    gddr: bool = False


@dataclass(frozen=True)
class TensorSheet:
    """Datasheet of a card whose tensor-core kernels were measured."""

    sms: int
    boost_ghz: float
    tflops: Mapping[str, float]


_HOPPER = TensorSheet(132, 1.98, {"tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.8})
TENSOR_SHEETS = {
    "a100-80gb": TensorSheet(108, 1.41, {"tf32": 156, "fp16": 312, "bf16": 312}),
    "h100-sxm": _HOPPER,
    "h200-sxm": _HOPPER,
    "b200": TensorSheet(148, 1.965, {"tf32": 1125, "fp16": 2250, "bf16": 2250, "fp8": 4500}),
}
"""Profile that others take their kernels from -> its datasheet."""

P100_GEMM = {
    "tflops": {"fp32": 8.144},
    "tiles": [[32, 128], [64, 64], [128, 32]],
    "split_k": 1,
    "prologue_k": 31.0,
    "timing_floor_us": 76.5,
    "wide_cost": 1.948,
    "wide_columns": 41730,
    "wide_power": 0.777,
}
P100_SOURCE = (
    "Tiles of the kernels that NeuSight's rows of Tesla P100-PCIE-16GB name (sitar-lab/NeuSight), "
    "constants fitted to 2000 of 6423 rows of its train split, tested on its test split: GMAE "
    "7.9 %, MAPE 13.5 %. Arithmetic slows threefold up to 42 thousand columns, as tiles of one "
    "wave stop sharing operands in 4 MiB of L2."
)

GB300_EXCHANGE = 3.73
"""Cost of an all-to-all's bytes between racks over that of other bytes: 8 GiB on 128 ranks took 180
ms (oci-hpc documentation), 24 GB/s of a rank's 100."""
GB300_NOTE = (
    f" Bytes of an all-to-all cost {GB300_EXCHANGE} times as much: one of 8 GiB on two racks of 64 "
    "took 180 ms (oci-hpc documentation), 24 GB/s of a rank's 100; no other table says why."
)

ROWS = " On NeuSight's fp32 rows of this card, never fitted: MAPE"
THROTTLES = ", predictions too short: the card (about 70 W) does not hold its boost clock."

CARDS = (
    Card("a30", "NVIDIA A30-24GB, PCIe", "a100-80gb", 24, 933, 56, 1.44, 24,
         {"fp32": 10.3, "tf32": 82, "fp16": 165, "bf16": 165}, 4, 100),
    Card("a40", "NVIDIA A40-48GB, PCIe", "a100-80gb", 45, 696, 84, 1.74, 6,
         {"fp32": 37.4, "tf32": 74.8, "fp16": 149.7, "bf16": 149.7}, 4, 100, gddr=True),
    Card("l4", "NVIDIA L4-24GB, PCIe", "a100-80gb", 22.5, 300, 58, 2.04, 48,
         {"fp32": 30.3, "tf32": 60, "fp16": 121, "bf16": 121}, 4, 100, gddr=True,
         gemm_error=0.6, gemm_note=ROWS + " 63 %" + THROTTLES, host="h100-sxm"),
    Card("l40", "NVIDIA L40-48GB, PCIe", "a100-80gb", 45, 864, 142, 2.49, 96,
         {"fp32": 90.5, "tf32": 90.5, "fp16": 181, "bf16": 181}, 4, 200, gddr=True,
         host="h100-sxm"),
    Card("l40s", "NVIDIA L40S-48GB, PCIe", "a100-80gb", 45, 864, 142, 2.52, 96,
         {"fp32": 91.6, "tf32": 183, "fp16": 362, "bf16": 362}, 4, 200, gddr=True,
         host="h100-sxm"),
    Card("a100-pcie-80gb", "NVIDIA A100-PCIe-80GB", "a100-80gb", 80, 1935, 108, 1.41, 40,
         {"fp32": 19.5, "tf32": 156, "fp16": 312, "bf16": 312}, 4, 200,
         gemm_error=0.15, gemm_note=ROWS + " 9.8 %."),
    Card("h100-pcie", "NVIDIA H100-PCIe-80GB", "h100-sxm", 80, 2039, 114, 1.755, 50,
         {"fp32": 51.2, "tf32": 378, "fp16": 756, "bf16": 756}, 5, 400),
    Card("h100-96gb", "NVIDIA H100-SXM5-96GB with HBM2e, 8 per host", "h100-sxm", 95, 2400, 132,
         1.98, 50, {"fp32": 66.9, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4}, 5, 400,
         link="h100-sxm", link_note="NVLink 4, the same board", gemm_error=0.15,
         sheet="meta-pytorch/torchrec PR 4637"),
    Card("h200-nvl", "NVIDIA H200-NVL-141GB, four joined by NVLink", "h200-sxm", 140, 4800, 132,
         1.785, 50, {"fp32": 60, "tf32": 417.5, "fp16": 835.5, "bf16": 835.5}, 5, 400,
         link="h200-sxm", switched=False, nvlink_domain=4,
         link_note="NVLink 4 bridge, 900 GB/s among four"),
    Card("gh200", "NVIDIA GH200-96GB, 4 per host, Slingshot 11", "h100-sxm", 94.5, 4000, 132, 1.98,
         50, {"fp32": 66.9, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4}, 5, 200, link="h100-sxm",
         link_note="NVLink 4, four cards joined directly", switched=False, gpus_per_host=4,
         nvlink_domain=4,
         host_link_gb_s=360, nics="gh200"),
    Card("gb200", "NVIDIA GB200 NVL72, 4 per host", "b200", 185, 8000, 148, 1.965, 126,
         {"fp32": 80, "tf32": 1250, "fp16": 2500, "bf16": 2500}, 5, 400, link="gb200",
         link_note="NVLink 5, 72 GPUs in one domain", gpus_per_host=4, nvlink_domain=72,
         host_link_gb_s=360),
    Card("b300", "NVIDIA B300-SXM, 8 per host", "b200", 268, 8000, 148, 1.92, 126,
         {"fp32": 75, "tf32": 1125, "fp16": 2250, "bf16": 2250}, 5, 800, link="b200",
         link_note="NVLink 5"),
    Card("gb300", "NVIDIA GB300 NVL72, 4 per host", "b200", 277, 8000, 152, 1.92, 126,
         {"fp32": 80, "tf32": 1250, "fp16": 2500, "bf16": 2500}, 5, 800, link="gb200",
         link_note="NVLink 5, 72 GPUs in one domain", gpus_per_host=4, nvlink_domain=72,
         host_link_gb_s=360, all_to_all_factor=GB300_EXCHANGE, nic_note=GB300_NOTE),
    Card("v100-dgx2", "NVIDIA V100-SXM3-32GB, 16 per host (DGX-2, NVSwitch)", "v100-32gb", 32, 900,
         80, 1.53, 6, {"fp32": 15.7, "fp16": 125}, 3, 50, link="a100-80gb", link_factor=2.0,
         link_note="NVSwitch too; NVLink 2 has six links a GPU where NVLink 3 has twelve",
         gpus_per_host=16, nvlink_domain=16, l2_gb_s=2847.5, gemm={"tflops": {"fp32": 14.1}},
         gemm_source="Constants of v100-32gb, the same chip.", gemm_error=0.15),
    Card("t4", "NVIDIA T4-16GB, PCIe", "v100-32gb", 15, 320, 40, 1.59, 4,
         {"fp32": 8.1, "fp16": 65}, 3, 100, gemm_error=0.4, gemm_note=ROWS + " 42 %" + THROTTLES),
    Card("p4", "NVIDIA P4-8GB, PCIe", "v100-32gb", 7.5, 192, 20, 1.063, 2,
         {"fp32": 5.5}, 3, 100, gemm_error=0.2, gemm_note=ROWS + " 13 %."),
    Card("p100-pcie-16gb", "NVIDIA P100-PCIe-16GB", "v100-32gb", 16, 732, 56, 1.303, 4,
         {"fp32": 9.3, "fp16": 18.7}, 3, 100, gemm=P100_GEMM, gemm_source=P100_SOURCE),
)  # fmt: skip
