"""The dense part of a traced job: which work belongs to it, and what it took.

Imports `predictor.trace.events`, `intervals` and `comms`.
"""
