"""What devices and their software cost: profiles, their schema, and how files become profiles.

`profiles` holds the shipped profiles, `runtimes` the constants of frameworks.
May import `model`.
"""
