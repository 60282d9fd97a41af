"""The README's tables of accuracy, taken from docs/accuracy.md, so that both say the same.

python -m lab readme README.md docs/accuracy.md
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lab.tools import make_parser
from predictor.errors import InputError, ShardoptError
from shardopt.files import atomic_write_text, decode, read_bytes

START, END = "<!-- generated: {} -->", "<!-- end of {} -->"
SHOWN = (
    (
        "torchrec-cpu",
        "batches fresh *",
        "plans of 15 models, two CPU ranks",
        "yes; models of the family developed on",
    ),
    (
        "torchrec-cpu",
        "all plans",
        "the same, all 51 models",
        "no; predictors were chosen on 431 rows",
    ),
    (
        "against-torchrec",
        "plans *",
        "TorchRec's and our plans of 52 models, two CPU ranks",
        "40 models yes; 12 of the family developed on, since looked at",
    ),
    (
        "against-torchrec",
        "random plans",
        "random plans of 20 of the models",
        "yes; models of other families",
    ),
    (
        "architectures",
        "plans blind *",
        "plans of 7 rankers from their modules (towers, experts, attention), two CPU ranks",
        "yes; other models of the families looked at",
    ),
    (
        "architectures",
        "plans looked at",
        "the same of 14 other rankers",
        "no; kernel models were chosen on these; blind before: 13.4 %",
    ),
    (
        "drifting",
        "plans *",
        "plans of 40 models in windows of drifting data, two CPU ranks",
        "yes; models of the family developed on",
    ),
    (
        "transformers-cpu",
        "targets *",
        "BERT, GPT-2 and XLNet steps, CPU ranks",
        "yes; other shapes of the same families",
    ),
    ("replay", "models *", "generated benchmarks, CPU ranks", "6 of 19 models: 4.2 % mean"),
    (
        "torchrec-p4d",
        "published throughput *",
        "TorchRec's published throughput, 1 to 8 A100",
        "no; nothing fitted, but known when the model was made",
    ),
    (
        "mlperf-dlrm",
        "platforms never fitted",
        "HugeCTR (not TorchRec) in MLPerf, seven platforms never fitted",
        "no; rules for PCIe cards were set on these",
    ),
    (
        "mlperf-dlrm",
        "fitted families, later rounds, h100-sxm, one row a configuration",
        "the same, H100 in later rounds: four configurations of eleven systems",
        "no; the same configurations were fitted on earlier software",
    ),
    (
        "transformers",
        "timings that no fit saw *",
        "GPT under Megatron, up to 8 A100 (vTrain): sums of 8 timings",
        "no; not fitted, but known when the model was made",
    ),
    (
        "transformers",
        "several nodes",
        "the same on 64 to 512 A100",
        "no; not fitted, but known when the model was made",
    ),
    (
        "dlrm-published",
        "fp32 and TF32, unfused *",
        "DLRM of NVIDIA's examples, V100, unfused",
        "no; nothing fitted, but rules were set on these",
    ),
    (
        "dlrm-published",
        "fp32 and TF32, CUDA graphs and fused MLPs",
        "the same, V100 and A100, with CUDA graphs and fused MLPs",
        "no; nothing fitted, but rules were set on these",
    ),
    (
        "traces",
        "steps, host times of the other steps *",
        "steps of public GPU traces",
        "no; kernel times are the trace's, rules were set on these",
    ),
    (
        "torchrec-steps",
        "one cold loop",
        "TorchRec's pipeline benchmark on 2 GPUs, a first loop of 10 steps",
        "nothing fitted; a first loop holds 0.5 to 5 s more than its steps",
    ),
    (
        "tbe",
        "lookups on stated GPUs *",
        "FBGEMM's lookups on H100: in HBM, over UVM and behind its cache",
        "held out, known when the model was made; blind before: 70 %",
    ),
    (
        "collectives",
        "within a domain, from 16 MiB *",
        "NCCL within an NVLink domain, H100 to GB300",
        "held out, known when the model was made; blind before: 14 %",
    ),
    (
        "collectives",
        "across hosts, from 8 MiB",
        "NCCL across hosts",
        "held out, known when the model was made; blind before: 57 %",
    ),
    (
        "gemm",
        "tensor cores: tf32, bf16 *",
        "products in TF32 and bf16, H100 and B200",
        "held out, known when the model was made; blind before: 17 %",
    ),
    (
        "gemm",
        "devices of the train split",
        "fp32 products, three GPUs",
        "no; not fitted, but known when the model was made",
    ),
    (
        "gemm",
        "unseen devices",
        "fp32 products, five other GPUs",
        "yes; from datasheet peaks",
    ),
    (
        "ops",
        "memory-bound ops *",
        "regroup, index select and the like, H100",
        "held out, known when the model was made; blind before: 17 %",
    ),
)
"""Suite, its part, what is predicted in it, and whether it is blind; * marks a suite's headline."""
AGAINST = "against TorchRec's planner"
FORETOLD = "foretold gains"
OURS = "shardopt, machine calibrated"
INDEPENDENT = (
    "| independent check: plain gloo ranks, 8 models of another generator, two calibrations each "
    "| 16 | -0.9 % (mean) | +4.0 % (mean) | -6.3 to +6.7 %, repeat noise 4 % |"
)
"""Made with another harness, so its rows are not in this repository."""
_ERRORS = re.compile(
    r"\| (?P<part>[^|]+) \| (?P<figures>\d+ \| [\d.]+ % \| [\d.]+ %) \| [+-]?[\d.]+ % \|"
)


def updated(readme: str, accuracy: str, where: str = "README.md") -> str:
    """The README with the figures of the accuracy page.

    Raises:
        InputError: a suite or part is not on the page, or a marker not in the README.
    """
    for name, lines in (("accuracy", _errors(accuracy)), ("gain", _gain(accuracy))):
        start, end = START.format(name), END.format(name)
        before, found, rest = readme.partition(start)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise InputError(f"{where}: lacks '{start}' and '{end}', between which a table goes")
        readme = "\n".join((before + start, "", *lines, "", end + after))
    return readme


def _errors(accuracy: str) -> Iterator[str]:
    sections = _sections(accuracy)
    yield "| `python -m lab validate` | what is predicted | n | mean | geometric mean | blind? |"
    yield "|---|---|---|---|---|---|"
    for suite, part, about, blind in SHOWN:
        found = {m["part"]: m["figures"] for m in _ERRORS.finditer(sections.get(suite, ""))}
        if part not in found:
            raise InputError(f"the accuracy page has no part '{part}' of the suite '{suite}'")
        yield f"| `{suite}` | {about} | {found[part]} | {blind} |"


def _sections(accuracy: str) -> Mapping[str, str]:
    """Suite -> its text."""
    parts = re.split(r"^## (\S+)\n", accuracy, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _gain(accuracy: str) -> Iterator[str]:
    text = _sections(accuracy).get("against-torchrec", "")
    gains = [of for of in _table(text, AGAINST) if of.get("plans of") == OURS]
    if not gains:
        raise InputError(f"the accuracy page has no row '{OURS}' in '{AGAINST}'")
    foretold = {_group(of): of for of in _table(text, FORETOLD) if of.get("plans of") == OURS}
    yield "| measured by | models | mean gain | foretold | |"
    yield "|---|---|---|---|---|"
    for of in gains:
        yield (
            f"| `python -m lab against`: {of['runtime']} runtime, models: {of['models']}, "
            f"task set: {of['task set']} | {of['tasks']} "
            f"| {of['mean gain']} ({of['from']} to {of['to']}) "
            f"| {foretold[_group(of)]['mean foretold']} "
            f"| {of['faster']} faster, {of['equal']} equal, {of['slower']} slower |"
        )
    yield INDEPENDENT


def _group(of: Mapping[str, str]) -> tuple[str, ...]:
    return of["runtime"], of["models"], of["task set"]


def _table(text: str, title: str) -> Iterator[Mapping[str, str]]:
    """The rows of the table under a heading, by the names of its columns."""
    found = re.search(rf"### {title}\n(.*?)(?=\n###|\Z)", text, flags=re.DOTALL)
    lines = [line for line in (found[1] if found else "").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    for row in cells[1:]:
        yield dict(zip(cells[0], row, strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Write the figures into the README."""
    parser = make_parser(__file__, __doc__)
    parser.add_argument("readme", type=Path, help="README.md, whose tables are replaced")
    parser.add_argument("accuracy", type=Path, help="docs/accuracy.md, which has the figures")
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
