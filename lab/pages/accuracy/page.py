"""docs/accuracy.md: every figure with the rows behind it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from lab.pages.accuracy.scores import ERRORS, scores_markdown
from lab.validate.report import Report, Summary

HEAD = """# Accuracy

Written by `python -m lab validate all --data DIR --write-docs docs/accuracy.md`; docs/data.md says
where the files in DIR come from. Change the predictor, not this page.

Every figure compares a prediction with a measurement. *MAPE* is the mean of |predicted / measured -
1|. *Geomean* is the geometric mean of the same errors; the literature reports it, and it is smaller
on the same rows. The part marked * is the headline of a suite: no constant was fitted on its rows.
That does not make it blind. Where the form of a model was chosen with the rows in view, the suite
says so.

Where a suite has intervals, *covered* is the share of rows that lie in their 90 % interval. *Noise*
compares repeats of one measurement: no prediction can be better.

**Not validated**, since no public row measures it: overlap of kernels and NCCL on one GPU, TWRW and
GRID over hosts under TorchRec, how many rows a cache misses.
"""

ABOUT = {
    "collectives": """Every row of six public tables with the shipped profile of its GPU, over its
ranks and hosts (decision 43). Rows that gave a constant to a profile are a part of their own. The
others are held out but not blind: bands, latencies and the choice of rows were compared on them.
Scored before anything was changed, rows within a domain from 16 MiB had 14.5 % and rows across
hosts from 8 MiB 57 %.

- Below 1 MiB nccl-tests is believed. XLA times a whole program around the collective; those rows
  are apart.
- Networks whose line rate no table states, a network that its publisher calls poorly configured,
  and cards with NVLink bridges in pairs are apart as well: no shipped profile is of them.
- `form of the curve` refits the tables themselves on every second size, or at 2, 4 and 8 ranks, and
  is tested on the rest: what the form alone can reach. Tables of vidur have three repeats in whole
  microseconds; where these are 10, 44, 28 and 56 us for 2, 10, 18 and 26 KiB, no curve that never
  falls can follow. Such rows are kept.
- GB200's rings of 32 ranks at 64 and 256 MiB are 28 % slower than those of 8 and 64, which no rule
  here explains.""",
    "gemm": """Tensor cores: batched products of sides 256 to 4096 that XLA timed, kernels alone,
with the constants of each GPU's profile. Repeats on other dates are the noise.

Devices of the train split: constants fitted on rows of the train split of NeuSight. Unseen
devices: datasheet peaks times the fraction that A100 reaches. T4 and L4 are 70 W cards, which
cannot hold their boost clock in long products; the rule does not know that and misses them. P100's
8 % is borderline: the same model fitted to 900 other train rows has 8.1 % on the test split and 9.4
% on train rows left out. The test split is not blind: its errors were looked at while the model was
developed. Unseen devices are.""",
    "tbe": """Passes of FBGEMM's fused lookups. Rows that gave a constant are a part of their own.
Misses of a cache were not recorded; the suite's note says what they are taken to be.""",
    "ops": """Times out of pull requests, most of traced kernels. An op is charged what a prediction
charges it: joined columns for a regroup, one pass over its bytes otherwise, a kernel a tensor where
the implementation runs one.""",
    "mlperf-dlrm": """HugeCTR (not TorchRec) in half precision under CUDA graphs, with the plans of
its public planner. The runtime's constants were fitted on A100-SXM and H100-SXM rows of rounds up
to v3.1 (part `fit`, which includes later submissions of the same measurement) and are frozen. Of
the part `test`, platforms that were never fitted and later rounds of fitted families are also shown
apart: the second are few configurations, as most systems of a round run the same one, and H100's
are those that were fitted on earlier software. Known misses:

- D54U-3U (H100-PCIe, 37 and 46 ms): NCCL sends data between cards behind different host bridges
  through host memory. The logs also show that the runs slowed down from 23 and 16 ms to twice that
  after minutes, evaluation included.
- SYS-421GU-TNXR took 5.6 ms in v3.1, a similar machine 4.4 ms.
- The 64 A100 of v4.0 had a 200 Gbit/s Ethernet port per card (Juniper's description of such
  servers), as in the profile, and were slower for an unknown reason.
- In v3.0, 64 GPUs are predicted too slow and 128 too fast.

Rounds v2.x trained another model with HugeCTR's hybrid embedding; its threshold is the source's.
Plans of A40, L40 and L40S are those of their logs. Not blind: how PCIe cards share a switch was
decided after rows of part `test` had been seen (first predictions of A40, L40, L40S and H100-PCIe
were 26 to 33 % short). The order of the hybrid embedding's steps follows the source, but was set
with the rows of A100-PCIe and A30 in view.""",
    "dlrm-published": """DLRM of NVIDIA's DeepLearningExamples, PyTorch and TensorFlow 2, one and
eight GPUs. Parts are by precision and by what the software fuses; what it did besides, by date, is
in predictor/hardware/runtimes/examples.yaml (decision 46). Nothing was fitted on these rows, but
where the bottom MLP ran and how NCCL before 2.8 crossed a DGX-1 were looked for with them in view.
Before that, as TorchRec would have run them, unfused rows were missed by 35 %, fused ones by 16 %
and mixed precision by 34 %. Misses:

- The first release (April 2020): a lookup a table, sparse gradients, an interaction that indexes.
- TensorFlow of 2021 on A100: 9 ms an iteration that vanish in March 2022.
- Mixed precision on A100 is predicted too fast.""",
    "torchrec-steps": """Steps of TorchRec's own pipeline benchmark on two GPUs, each under the plan
that its planner printed (or, where none was printed, under its rule). Nothing was fitted on these
rows (decision 45). A row with one loop was cold: a loop of ten batches takes 0.5 to 5 s more than
ten steps, of light models as of heavy ones. Misses:

- A prefetch into UVM caches is taken to overlap with all other kernels; these rows say it costs 27
  to 180 ms a step, and its repeats lie 30 % apart.
- Shampoo, and a synchronisation after the forward, are not modelled.""",
    "torchrec-p4d": """TorchRec's published throughput on p4d (A100-40GB), with software of 2021 to
2023 and the default planner. The two rows of 256 samples a GPU gave the cost of the host and
stand apart (decision 45); the others were known when the model was made. They include loading
data on the host, which the predictor does not model: the loader has no workers, so the training
thread makes every batch (torchrec_dlrm/data/dlrm_dataloader.py). Repeated on one core, 2048
samples take 0.3 ms, or 6.7 ms if they are expanded to multi-hot ids (multi_hot.py). Added to the
9.0 ms predicted for `dot`, which the host bounds, that makes 15.7 of the 17.7 ms measured. It is
not added, because the source does not say which data set those runs read. Small one-hot batches
are host-bound too (1.2 of 7.3 ms are device time at 256 samples). Runs with the same 256 samples
per rank were published with 7.2 and 10.0 ms.""",
    "transformers": """GPT in half precision under Megatron, with tensor, data and pipeline
parallelism. Six constants of the software were fitted on 100 rows of one node (part `fit`, chosen
by a hash of the configuration); matrix products, softmax and collectives are those of the profile.
vTrain, the simulator that the rows were published with, reports 8.37 % on one node and 14.73 % on
several.

- Rows of one node are published as measured. But rows with equal hidden size, tensor parallelism
  and micro-batch are sums of the same few numbers, to the last nanosecond: each combination was
  timed once, layer by layer, and its rows were composed. They check kernels, launches and schedule
  on 32 combinations, not on 732 runs. The fit saw 24 of these; only the rows of the 8 others, the
  headline, test it.
- Three combinations are faster than their launches would take and are missed by 23 % on average:
  hidden size 2048 at tensor parallelism 4 and micro-batches 1 and 2, and 1024 at 2 and 4. The
  second of them has 23 of the headline's 64 rows; decision 46 says what was tried.
- Not blind: the constants saw only the rows of part `fit`, but these share timings with most other
  rows of one node, and the structure was found with all of them in view (no recomputation on one
  node, an unpadded vocabulary, where PyTorch's softmax replaces Megatron's, host and device level
  at every layer, no fp32 copy of the weights).
- Rows of several nodes are measured runs, and nothing was fitted on them. Misses of up to 47 %: six
  runs of 39 billion parameters with tensor parallelism 2, the runs whose tensor parallelism of 16
  spans two nodes, and one run with a single micro-batch. All took far longer than similar runs.""",
    "torchrec-cpu": """TorchRec on CPU ranks over gloo: random models and plans, run by `shardopt
bench run` in batches, each after its own `shardopt calibrate`. Predictions use the calibration and
the reference kernels that run between the plans, but no iteration. `batches fresh` were scored with
the final predictor only and lead; 21 versions were compared on the others. Figures are corrected
for drift unless they say otherwise: what reference kernels took while a task ran, over what they
took at calibration, scales every constant. On fresh batches that does not help. Models come from
one generator and the runtime is tuned (real-time gloo threads), but for the crossed batch, whose
ranks are plain (decision 39). Rows, models and calibrations are in configs/bench/torchrec-cpu.""",
    "against-torchrec": """The plan that TorchRec's planner makes with its defaults and the plan
that `shardopt plan` makes, run interleaved on two CPU ranks by `python -m lab against`, for models
drawn from seeds that nothing was developed on.

- The first version of this table was an outside check of an earlier version: plain gloo ranks,
  eight models of another generator, 16 comparisons, a mean gain of -0.9 % (-6.3 to +6.7 %, repeat
  noise 4 %) where +4.0 % was predicted. Decision 41 says why.
- The plain sets are blind: ranks as a training script runs them, models that no prediction sized
  (decision 37), rules fixed before, nothing changed since. So were the seeds, but for task 10 of
  shapes, which stands in for task 8. The largest miss is a model of
  sequence features (shapes, task 4), all of whose plans take 1.7 to 2.3 times as long as predicted.
  Row-wise plans are predicted too fast: three published models for which ours is row-wise were
  foretold to gain 2.4 % and measured -1.0 %.
- Of the rounds of the tuned set 46 % were dropped, as other work ran beside them; the note says how
  many of which task. Of the plain sets 0.5 % were, and one task whole.
- The tuned set is of an earlier version, on models of the generator that the predictor was
  developed on. Its plans are those of that version; what was wrong about its replicated tables was
  found on it (decision 28).
- On CPUs TorchRec's sharders offer its planner no row-wise split; ours may use it, and `types` says
  where it does. Rows are in configs/bench/against-torchrec.""",
    "architectures": """Models whose dense part is no DLRM's, run by `python -m lab batch --models
architectures` on two CPU ranks: DCN-v2 and DeepFM of TorchRec's own modules, MMoE, two modules of
unlike widths, SASRec-like and HSTU-like attention over an EmbeddingCollection, and DLRMs beside
them. The dense part is captured from the module that ran; constants are those of a calibration made
before, of single kernels. Decision 55 keeps the first score, made before anything was changed for
these models; decision 60 says what was changed since, and which tasks were looked at for it.
Blind plans are of models drawn and predicted once, after that. Only rounds without other work on
the machine count.
Rows, models and ops files are in configs/bench/architectures.""",
    "drifting": """Models of two or three windows of data, planned for the first window, for the
least regret over all, and by TorchRec's planner; every plan was run in every window (decision 65).
In 12 of 20 tasks the first two are the same plan. Where they differ the plan of least regret takes
3.1 % longer in its worst window, in the median, and 1.4 % in the first; no difference is beyond its
interval. That it gains is not shown. Rounds are few, iterations short, and plans were searched at
effort 0.1.""",
    "transformers-cpu": """Training steps of small BERT-, GPT-2- and XLNet-like models, one CPU core
per rank, run by `python -m lab transformers`; two ranks use DistributedDataParallel over gloo. The
ops of a target come from fake tensors, their times from kernel models fitted inside steps of other
shapes (docs/model.md, chapter 22). Lin et al. (2024) report a geometric mean of 3.00 % on GPUs.
Rows are in configs/bench/transformers-cpu. The form of the models was chosen on other shapes, which
are neither fitted nor targets (decision 19).""",
    "traces": """Steps of public PyTorch traces, each predicted from its own structure and kernel
times, with host times of the trace's other steps (docs/model.md, chapter 18). Misses:

- The first step of the V100 trace waits for device work that was launched before the trace. It is
  predicted 22 % short, marked, and in no mean.
- Host times of another trace do not predict a host-bound step: a vision model's loader, another
  machine's Python.
- The shipped constants of matrix products miss shapes with one very small or very long side by up
  to 4 times. Nothing was fitted to these.
- On the 8 ranks errors stay within 2 % per step and 50 us per collective with each rank's own host
  times between its calls, but not with those of the other ranks.

Not blind: the rules for kernels that fill the device and for what a stream waits for were chosen
with these traces in view. They have no fitted constants.""",
    "replay": """Benchmarks generated from traces of small models (docs/replay.md), one iteration
each, predicted from kernel models of other benchmarks' calls (docs/model.md, chapter 23). Misses:
on two ranks matrix products take about 9 % longer than predicted, because the other rank runs at
the same time, and a DLRM of wide tables is predicted 11 % short. Forward lookups in those models
are predicted 22 % too long; they are 3 % of the time. Blind in part: the form of the convolution
model was revised after errors on the first 13 models were seen, and four convnets were added to the
calibration then; six models were first measured after that. Rows are in configs/bench/replay, from
one machine within half an hour.""",
}
"""What a reader must know of a suite, misses first."""


def accuracy_text(reports: Sequence[Report]) -> str:
    """The page as Markdown."""
    parts = [HEAD, *(part for report in reports for part in _section(report))]
    return "\n".join(parts).rstrip() + "\n"


def _section(report: Report) -> Iterator[str]:
    yield f"## {report.suite}\n"
    yield ABOUT.get(report.suite, "") + "\n"
    yield from _head("rows")
    for name, summary in report.by_part().items():
        yield f"| {name}{' *' if name == report.headline else ''} | {_errors(summary)} |"
    for name, summary in report.noise.items():
        yield f"| noise: {name} | {_errors(summary)} |"
    yield ""
    yield from _head("part", "platform")
    for (part, family), summary in report.by_family().items():
        yield f"| {part} | {family} | {_errors(summary)} |"
    yield ""
    yield from (f"- {note}" for note in report.notes)
    for scores in report.scores:
        yield from scores_markdown(scores)
    if len(report.rows) <= MOST_ROWS and not report.scores:
        yield from _rows(report)
    else:
        yield (
            f"\n{len(report.rows)} rows: `python -m lab validate {report.suite} --data DIR --json` "
            "prints each with its source."
        )
    if report.skipped:
        yield f"\nLeft out ({len(report.skipped)}):\n"
        yield from (f"- {text}" for text in report.skipped)
    yield ""


MOST_ROWS = 200


def _rows(report: Report) -> Iterator[str]:
    keys = list(dict.fromkeys(key for row in report.rows for key in row.name))
    yield "\n| part | " + " | ".join(keys) + " | measured ms | predicted ms | error | source |"
    yield "|" + "---|" * (len(keys) + 5)
    for row in report.rows:
        cells = " | ".join(str(row.name.get(key, "-")) for key in keys)
        yield (
            f"| {row.part} | {cells} | {row.measured_ms:.4g} | {row.predicted_ms:.4g} | "
            f"{100 * row.error:+.1f} % | {row.source} |"
        )


def _head(*first: str) -> Iterator[str]:
    titles = (*first, *ERRORS)
    yield f"| {' | '.join(titles)} |"
    yield "|" + "---|" * len(titles)


def _errors(summary: Summary) -> str:
    figures = (summary.mape, summary.geomean, summary.worst, summary.covered)
    shown = ("-" if math.isnan(f) else f"{100 * f:.1f} %" for f in figures)
    return f"{summary.n} | " + " | ".join(shown)
