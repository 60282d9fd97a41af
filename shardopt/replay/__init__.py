"""Benchmarks out of traces: PyTorch programs that repeat a traced iteration without its model.

`generate` (the spine of `shardopt bench generate`) turns traces into programs (`program`, or
`kineto` where there is no execution trace), changes their sizes (`scale`) and writes them
(`write`) together with what they run on (`runtime`). `launch` runs a benchmark, `predict`
predicts it. An import goes down this list alone: generate and predict, launch, write, kineto and
scale, program, check.
"""
