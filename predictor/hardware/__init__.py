"""Costs of devices and their software: profiles, their schema, and how files become profiles.

`profiles` holds the shipped profiles, `runtimes` the constants of frameworks.
May import `model`.
"""
