"""A plan that is already running: which tables stay, and what moving the others takes."""
