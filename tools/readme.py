"""The README's tables of accuracy, taken from docs/accuracy.md, so that both say the same.

python -m tools.readme README.md docs/accuracy.md
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from predictor.errors import InputError, ShardoptError
from shardopt.files import atomic_write_text, decode, read_bytes

START, END = "<!-- generated: {} -->", "<!-- end of {} -->"
SHOWN = (
    ("torchrec-cpu", "plans *", "TorchRec plans of random models on two CPU ranks"),
    ("against-torchrec", "plans *", "TorchRec's and our plans of twelve further models, the same"),
    ("transformers-cpu", "targets *", "BERT-, GPT-2- and XLNet-like steps on CPU ranks, DDP too"),
    ("replay", "models *", "benchmarks out of traces, replayed on one and two CPU ranks"),
    ("transformers", "test *", "GPT on 8 A100 (vTrain): tensor, data and pipeline parallel"),
    ("traces", "steps, host times of the other steps *", "steps of public GPU traces, replayed"),
    ("mlperf-dlrm", "h100-sxm from v4.0 on", "MLPerf DLRM on H100, rounds from v4.0 on"),
    ("mlperf-dlrm", "accelerators never fitted", "the same on accelerators never fitted"),
    ("torchrec-p4d", "published throughput *", "TorchRec's published throughput, 1 to 8 A100"),
    ("collectives", "sizes left out *", "NCCL times at sizes left out"),
    ("gemm", "devices of the train split *", "fp32 multiplications, NeuSight's test split"),
)
"""Suite, its part, and what is predicted in it; a * marks the headline of a suite."""
AGAINST = "against TorchRec's planner"
_ERRORS = re.compile(
    r"\| (?P<part>[^|]+) \| (?P<figures>\d+ \| [\d.]+ % \| [\d.]+ %) \| [\d.]+ % \|"
)


def updated(readme: str, accuracy: str, where: str = "README.md") -> str:
    """The README with the figures of the accuracy page.

    Raises:
        InputError: a suite or part is not on the page, or a marker not in the README.
    """
    for name, lines in (("accuracy", _errors(accuracy)), ("against", _against(accuracy))):
        start, end = START.format(name), END.format(name)
        before, found, rest = readme.partition(start)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise InputError(f"{where}: lacks '{start}' and '{end}', between which a table goes")
        readme = "\n".join((before + start, "", *lines, "", end + after))
    return readme


def _errors(accuracy: str) -> Iterator[str]:
    sections = _sections(accuracy)
    yield "| `shardopt validate` | what is predicted | n | mean error | geometric mean |"
    yield "|---|---|---|---|---|"
    for suite, part, about in SHOWN:
        found = {m["part"]: m["figures"] for m in _ERRORS.finditer(sections.get(suite, ""))}
        if part not in found:
            raise InputError(f"the accuracy page has no part '{part}' of the suite '{suite}'")
        yield f"| `{suite}` | {about} | {found[part]} |"


def _sections(accuracy: str) -> Mapping[str, str]:
    """Suite -> its text."""
    parts = re.split(r"^## (\S+)\n", accuracy, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _against(accuracy: str) -> Iterator[str]:
    text = _sections(accuracy).get("against-torchrec", "")
    found = re.search(rf"### {AGAINST}\n(.*?)(?=\n###|\Z)", text, flags=re.DOTALL)
    if found is None:
        raise InputError(f"the accuracy page has no table '{AGAINST}'")
    yield from (line for line in found[1].splitlines() if line.startswith("|"))


def main(argv: Sequence[str] | None = None) -> int:
    """Write the figures into the README."""
    parser = argparse.ArgumentParser(prog="python -m tools.readme")
    parser.add_argument("readme", type=Path)
    parser.add_argument("accuracy", type=Path)
    given = parser.parse_args(argv)
    try:
        readme, accuracy = (
            decode(read_bytes(path, "page"), path) for path in (given.readme, given.accuracy)
        )
        atomic_write_text(given.readme, updated(readme, accuracy, str(given.readme)))
    except (ShardoptError, OSError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
