"""A plan that is already running: which tables may stay, and what moving the others takes.

May import `candidate`, `objective`, `space` and `problem`.
"""
