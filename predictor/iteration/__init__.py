"""One training iteration: its graph, when it runs, and its critical path.

`plan_scorer` does it for many plans at once. Each runtime has a folder that builds its graphs:
`torchrec`, `hugectr` and `megatron`. May import `cost`, `hardware` and `model`.
"""
