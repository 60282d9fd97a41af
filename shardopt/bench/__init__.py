"""Runs plans and planners for real and keeps what they took.

`run` times plans side by side and `confirm` until the fastest is known; `worker` is one rank of
both. `planners` times our search beside TorchRec's planner, `learn` corrects a profile by traces.
"""
