"""Plan in use: the tables that may stay, and the price of moving the others.

May import `candidate`, `objective`, `space` and `problem`.
"""
