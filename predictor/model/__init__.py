"""The inputs as data: workload, plan, topology, index distributions and memory.

May import only `predictor.errors` and `predictor.units`, as every room of predictor may.
"""
