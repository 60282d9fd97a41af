"""``shardopt explain``: where the time of a plan goes and what would help most."""

from __future__ import annotations

from pathlib import Path

from shardopt.api.request import Machine
from shardopt.report.blocks import View


def explain(
    model: Path,
    plans: list[Path],
    machine: Machine,
    strict: bool = False,
    html: Path | None = None,
    trace: Path | None = None,
) -> View:
    """Show where the time of a plan goes and which changes would help most.

    Ranks and hardware are those of the first plan unless you set them.

    Arguments:
        plans (PLAN...): Plan file (JSON) to explain; further plans are compared with it.

    Output:
        html (FILE): Write the report as one web page: timeline, ranks, tables, comparison, sources.
        trace (FILE): Write the predicted timeline to this file, for ui.perfetto.dev or
            chrome://tracing.
    """
    from predictor.errors import InputError
    from predictor.trace.chrome import chrome_trace
    from shardopt.api.cache import versions
    from shardopt.api.explanation import explain_plans
    from shardopt.cli.output import check_writable, predict_plans, write_json
    from shardopt.files import atomic_write_text
    from shardopt.report.explain import explain_view
    from shardopt.report.html.page import page

    for path in (html, trace):
        check_writable(path, [model, *plans])
    if html is not None and trace is not None and html.resolve() == trace.resolve():
        raise InputError(f"--html and --trace both name {html}; give them different files")
    predicted = predict_plans(model, plans, machine, strict=strict)
    for path in (html, trace):
        check_writable(path)
    answer, notes = explain_plans(predicted.setting, predicted.predictions), []
    if trace is not None:
        meta = {"plan": answer.plan, "versions": versions()}
        write_json(trace, chrome_trace(answer.prediction, meta=meta))
        notes.append(f"wrote {trace}; open it at ui.perfetto.dev")
    if html is not None:
        atomic_write_text(html, page(answer, versions()))
        notes.append(f"wrote {html}; open it in a browser")
    return explain_view(answer, notes)
