"""The command line: one file per command, and the only place that knows flags.

Commands import no other command; what they share is in `command`, `output` and `interrupts`.
Everything heavy is imported inside the commands, so that ``--help`` stays fast.
"""
