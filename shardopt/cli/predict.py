"""``shardopt predict``: the predicted time of given plans, side by side."""

from __future__ import annotations

from shardopt.cli import options


def predict(
    model: options.Model,
    plans: options.Plans,
    gpus: options.Gpus = None,
    gpus_per_node: options.GpusPerNode = None,
    cluster: options.Cluster = None,
    hardware: options.Hardware = None,
    hbm_gib: options.HbmGib = None,
    ddr_gib: options.DdrGib = None,
    reserve: options.Reserve = 0.15,
    batch_size: options.BatchSize = None,
    strict: options.Strict = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Predict the iteration time of given plans, side by side.

    Ranks and hardware are the plan's unless flags say otherwise.
    """
    from shardopt.cli.given_plans import predict_plans
    from shardopt.cli.messages import note
    from shardopt.cli.resolve import Flags

    flags = Flags(
        gpus, gpus_per_node, cluster, hardware, hbm_gib, ddr_gib, reserve, batch_size, strict
    )
    setting, predicted = predict_plans(model, plans, flags)
    note(setting.notes, quiet=quiet)
    if json:
        from shardopt.cli.output import print_json
        from shardopt.cli.plan import setting_object
        from shardopt.report.objects import predict_object

        pairs = [(item.name, item.prediction) for item in predicted]
        print_json(predict_object(pairs, setting_object(setting)))
        return
    from shardopt.report.console import make_console
    from shardopt.report.plan_view import show_setting
    from shardopt.report.predict_view import show_headlines, show_predictions

    console = make_console()
    if quiet:
        show_headlines(console, predicted)
        return
    show_setting(console, setting)
    show_predictions(console, predicted)
