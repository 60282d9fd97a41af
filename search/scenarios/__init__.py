"""Scenarios: what else the costs and the data could be, and how plans do there.

Imports `predictor` and the rest of `search`, but not `search.solve`.
"""
