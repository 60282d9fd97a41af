"""The options of every table, and what was left out with its reason."""
