"""The suites of `validate`: what each compares, what it reads and where its code is."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from predictor.errors import InputError, did_you_mean

if TYPE_CHECKING:
    from lab.validate.report import Report

COMMITTED = Path(__file__).resolve().parents[2] / "configs" / "bench"
"""Measurements of a source checkout; an installed package has none."""
ALL = "all"


@dataclass(frozen=True)
class Suite:
    """Predictions of one kind against measurements of one source.

    Args:
        name: on the command line and in docs/accuracy.md.
        about: what is predicted, for the help.
        module: has a function ``validate_NAME(folder) -> Report``.
        committed: its measurements are in `COMMITTED`; those of all others are public files.
    """

    name: str
    about: str
    module: str
    committed: bool = False

    @property
    def folder(self) -> Path | None:
        """The committed measurements, where they are there."""
        folder = COMMITTED / self.name
        return folder if self.committed and folder.is_dir() else None

    def run(self, data: Path | None = None) -> Report:
        """Predict and compare.

        Args:
            data: folder with the measurements; the committed ones if None.

        Raises:
            InputError: there are no such files, or they cannot be used.
        """
        folder = self.folder if data is None else data
        if folder is None and self.committed:
            raise InputError(
                f"{self.name} reads measurements that are in configs/bench/{self.name} of a source "
                "checkout and not in the installed package; give the folder that holds them",
                inputs=("data",),
            )
        if folder is None:
            raise InputError(
                f"{self.name} reads public files; give their folder (docs/data.md lists the files "
                "and where they are published)",
                inputs=("data",),
            )
        function = f"validate_{self.name.replace('-', '_')}"
        return getattr(import_module(self.module), function)(folder)


SUITES = (
    Suite("collectives", "collectives of NCCL", "lab.validate.collectives"),
    Suite("tbe", "FBGEMM's lookups on GPUs", "lab.validate.tbe"),
    Suite("gemm", "matrix products on ten GPUs", "lab.validate.gemm"),
    Suite("ops", "memory-bound ops beside lookups", "lab.validate.ops"),
    Suite("mlperf-dlrm", "MLPerf training of DLRM", "lab.validate.mlperf.suite"),
    Suite("dlrm-published", "DLRM in NVIDIA's examples", "lab.validate.dlrm_published"),
    Suite("torchrec-p4d", "TorchRec on A100-40GB", "lab.validate.torchrec_p4d"),
    Suite(
        "torchrec-steps",
        "steps of TorchRec's pipeline benchmark",
        "lab.validate.torchrec_steps.suite",
    ),
    Suite("transformers", "GPT under Megatron", "lab.validate.transformers"),
    Suite("traces", "steps of public PyTorch traces", "lab.validate.traces"),
    Suite(
        "torchrec-cpu",
        "TorchRec's plans on CPU ranks",
        "lab.validate.tasks.torchrec_cpu",
        committed=True,
    ),
    Suite(
        "against-torchrec",
        "the gain over the plans of TorchRec's planner, on CPU ranks",
        "lab.validate.tasks.against_torchrec",
        committed=True,
    ),
    Suite(
        "architectures",
        "models beside the DLRM, on CPU ranks",
        "lab.validate.tasks.architectures",
        committed=True,
    ),
    Suite(
        "drifting",
        "plans in windows of drifting data, on CPU ranks",
        "lab.validate.tasks.drifting",
        committed=True,
    ),
    Suite(
        "transformers-cpu",
        "training steps of transformers on CPU ranks",
        "lab.validate.transformers_cpu",
        committed=True,
    ),
    Suite(
        "replay",
        "generated benchmarks on CPU ranks",
        "lab.validate.replay",
        committed=True,
    ),
)


def find_suites(name: str) -> list[Suite]:
    """The suite of a name, or for ``all`` every suite but those whose committed rows are missing.

    Raises:
        InputError: there is no such suite.
    """
    if name == ALL:
        return [suite for suite in SUITES if suite.folder is not None or not suite.committed]
    names = {suite.name: suite for suite in SUITES}
    if name not in names:
        raise InputError(
            f"there is no suite '{name}'{did_you_mean(name, [*names, ALL])}; there are "
            f"{', '.join([*names, ALL])}"
        )
    return [names[name]]


def run_suites(name: str, data: Path | None) -> list[Report]:
    """What each suite of a name finds; under ``all``, ``data`` holds the public files alone."""
    return [
        suite.run(None if name == ALL and suite.committed else data) for suite in find_suites(name)
    ]
