"""Measured rows -> constants with their error on rows held out. The only place for scipy.

May import `iteration` and what lies below it.
"""
