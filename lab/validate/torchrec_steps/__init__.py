"""Whole steps of TorchRec's own pipeline benchmark, under the plans that its planner printed.

May import what `lab.validate` may.
"""
