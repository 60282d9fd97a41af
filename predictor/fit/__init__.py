"""From measured rows to constants, with their error on rows held out; and all scores.

The only place for scipy. May import `iteration` and what lies below it.
"""
