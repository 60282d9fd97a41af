"""Why nothing fits: a smallest set of conflicting demands, and what would help.

May import `propose` and what lies below.
"""
