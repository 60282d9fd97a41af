"""One training iteration: its graph, when it runs, and its critical path.

May import `cost`, `hardware` and `model`. A builder a runtime: `torchrec`, `hugectr`, `megatron`.
"""
