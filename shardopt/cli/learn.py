"""``shardopt learn``: corrects a hardware profile by traces of the job that runs."""

from __future__ import annotations

from pathlib import Path

from shardopt.report.blocks import View


def learn(
    files: list[Path],
    *,
    model: Path,
    plan: Path,
    output: Path,
    hardware: str | None = None,
    batch_size: int | None = None,
) -> View:
    """Correct a hardware profile by traces of your own job; runs nothing.

    Arguments:
        files (TRACE...): Kineto traces of the job, one file per rank: .json, .json.gz, .tar.gz, or
            folders of these.

    The job:
        model (MODEL): Model file (YAML) of the traced job.
        plan (PLAN): Plan file (JSON) that it ran under.
        batch_size (N): Samples per GPU of the traced job; those of the model file by default.

    Output:
        hardware (NAME|FILE): Profile to correct; that of the plan by default. One that has learned
            already learns more.
        output (-o FILE): Write the corrected profile to this file.
    """
    from shardopt.bench.learn import learn_from_traces, overlay_text
    from shardopt.cli.output import check_writable
    from shardopt.files import atomic_write_text
    from shardopt.report.learned import lesson_view

    check_writable(output, [model, plan, *files])
    setting, lesson = learn_from_traces(files, model, plan, hardware, batch_size)
    check_writable(output)
    text = overlay_text(lesson.learned, setting.hardware_name, output.resolve().parent)
    atomic_write_text(output, text)
    return lesson_view(lesson, str(output))
