"""Scenarios: other costs and data that are possible, and the times of plans under them.

Imports `predictor` and the rest of `search`, but not `search.solve`.
"""
