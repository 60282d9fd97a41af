"""Benchmarks out of traces: PyTorch programs that repeat a traced iteration without its model.

`generate` (the spine of `shardopt bench generate`) turns traces into programs (`program`), changes
their sizes (`doubled`, `more_tables`) and writes them (`write`) together with what they run on
(`runtime`). `launch` runs a benchmark. An import goes down this list alone: generate, launch,
write, doubled and more_tables, program, check.
"""
