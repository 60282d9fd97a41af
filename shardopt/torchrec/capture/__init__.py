"""Capture of a module's training step as ops on fake tensors: nothing is computed.

`recorder` notes the ops of a step, of fake tensors or of a program that others list; `inputs` makes
what forward takes; `step` runs one step; `capture` makes a program of four steps.
"""
