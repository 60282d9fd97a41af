"""A workload as a real TorchRec model: what measurements train, and TorchRec's planner on it.

Imported by what measures: `calibrate`, `measure`, `bench`, `stats`.
"""
