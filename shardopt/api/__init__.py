"""From files and numbers to predictions and plans, for the command line and for scripts.

    from search.solve import solve
    from search.stop import Stop
    from shardopt.api.request import Machine
    from shardopt.api.setting import resolve

    setting = resolve("model.yaml", Machine(gpus=8, hardware="h100-sxm"))
    result = solve(setting.problem(), Stop(), seed=0)
    prediction = setting.predict(result.best.plan)

Imports `predictor`, `search` and `shardopt.config`; never a renderer or a command.
"""
