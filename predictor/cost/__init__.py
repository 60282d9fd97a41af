"""Cost models: lookups, products, memory-bound ops, collectives, host work.

`loads` says what a shard puts on its rank; `load_sums` and `cache_sums` add that up for many plans.
May import `hardware` and `model`.
"""
