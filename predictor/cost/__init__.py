"""What one thing costs: lookups, products, memory-bound ops, collectives, host work.

May import `hardware` and `model`.
"""
