"""``shardopt predict``: the predicted time of given plans, side by side."""

from __future__ import annotations

from pathlib import Path

from shardopt.api.request import Machine


def predict(
    model: Path,
    plans: list[Path],
    machine: Machine,
    strict: bool = False,
    json: bool = False,
    quiet: bool = False,
) -> None:
    """Predict the iteration time of one or more plans.

    Ranks and hardware are those of the first plan unless you set them. For a benchmark that `bench
    generate` wrote, see `bench predict`.
    """
    from shardopt.cli.output import note, predict_plans, print_json
    from shardopt.report.console import make_console
    from shardopt.report.objects import predict_object
    from shardopt.report.prediction import show_headlines, show_predictions, show_setting

    setting, predicted = predict_plans(model, plans, machine, strict=strict)
    note(setting.notes, quiet=quiet)
    if json:
        pairs = [(item.name, item.prediction) for item in predicted]
        print_json(predict_object(pairs, setting.facts()))
    elif quiet:
        show_headlines(make_console(), predicted)
    else:
        console = make_console()
        show_setting(console, setting)
        show_predictions(console, predicted)
