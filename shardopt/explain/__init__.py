"""What there is to say of plans and traces: helpful changes, waits, what-if, differences.

Finds out and renders nothing: `shardopt.report` shows it. Imports `search` and `predictor`.
"""
