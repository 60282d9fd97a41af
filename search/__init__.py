"""Searches the sharding plans of a model and proves how far the best can be from optimal.

Start reading at `search.solve`. The order of modules and rooms is in pyproject.toml: each may
import only those below it.
"""
