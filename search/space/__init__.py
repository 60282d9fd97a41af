"""The options of every table, and what was left out with its reason.

`option` says what one is, `enumerate` lists them, `filters` takes out, `build` does both. May
import `problem` alone.
"""
