"""The inputs as data: workload, plan, topology, index distributions, memory. Imports nothing
above."""
