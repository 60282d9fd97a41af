"""``shardopt learn``: correct a hardware profile with traces of your own job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shardopt.report.blocks import TextTable, View

if TYPE_CHECKING:
    from shardopt.bench.learn import Lesson

MOST_ROWS = 20


def learn(
    files: list[Path],
    *,
    model: Path,
    plan: Path,
    output: Path,
    hardware: str | None = None,
    batch_size: int | None = None,
    step_ms: float | None = None,
) -> View:
    """Correct a hardware profile with traces of your own job; runs nothing.

    Arguments:
        files (TRACE...): Kineto traces of the job, one file per rank: .json, .json.gz, .tar.gz, or
            folders of these.

    The job:
        model (MODEL): Model file (YAML) of the traced job.
        plan (PLAN): Plan file (JSON) that the traced job ran.
        batch_size (N): Samples per GPU of the traced job; by default that of the model file.
        step_ms (MS): Time of a step without the profiler, which slows the host down. By default the
            time that `shardopt.torchrec.record` wrote into the traces, else an estimate on GPUs.

    Output:
        hardware (NAME|FILE): Profile to correct; by default that of the plan. A learned profile can
            be corrected further.
        output (-o FILE): Write the corrected profile to this file.
    """
    from shardopt.bench.learn import learn_from_traces, overlay_text
    from shardopt.cli.output import check_writable
    from shardopt.files import atomic_write_text

    check_writable(output, [model, plan, *files])
    setting, lesson = learn_from_traces(files, model, plan, hardware, batch_size, step_ms)
    check_writable(output)
    text = overlay_text(lesson.learned, setting.hardware_name, output.resolve().parent)
    atomic_write_text(output, text)
    return _view(lesson, str(output))


def _view(lesson: Lesson, path: str) -> View:
    """Return the factors with most evidence, costs without a match, and the new prediction."""
    from shardopt.formatting import ms

    most = sorted(lesson.learned.factors, key=lambda f: -f.evidence_ms)[:MOST_ROWS]
    rows = [
        (f.group, f.table or "", f"x{f.factor:.2f}", f"{f.error:.0%}", ms(f.evidence_ms))
        for f in most
    ]
    whole = lesson.measured_ms
    unmatched = [
        f"not matched: {cost.name}, {ms(cost.ms)}"
        + (f" ({cost.ms / whole:.1%} of a step)" if whole else "")
        for cost in lesson.unmatched
    ]
    end = (
        f"{ms(whole)} measured; {ms(lesson.before_ms)} predicted before, {ms(lesson.after_ms)} "
        f"now. Wrote {path}."
    )
    grid = TextTable(["<costs", "~table", ">factor", ">error left", ">evidence"], rows)
    return View(
        {"output": path, **lesson.as_object()}, [grid, *unmatched, end], [end], lesson.notes
    )
