"""Findings about plans and traces: helpful changes, waits, what-if, differences.

Renders nothing: `shardopt.report` shows them. Imports `search` and `predictor`.
"""
