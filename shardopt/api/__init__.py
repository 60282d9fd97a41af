"""From files and numbers to predictions and plans; `shardopt.calls` is the door for scripts.

Imports `predictor`, `search` and `shardopt.config`; never a renderer or a command.
"""
