"""Searches the sharding plans of a model and proves how far the best can be from optimal.

Start reading at `search.solve`.
"""
