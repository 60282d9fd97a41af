"""Predicts the time of one training iteration of a sharded recommendation model, measuring nothing.

Start reading at `predictor.predict`. An import goes only down this list (import-linter holds it):
`learn`, `trace`, `predict`, `iteration`, `cost`, `hardware`, `model`. Needs numpy, pydantic and
PyYAML; never torch.
"""
