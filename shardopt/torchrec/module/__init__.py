"""A user's module as a workload, and as a model file.

Imports `plan` and, for the optimizers, `training`.
"""
