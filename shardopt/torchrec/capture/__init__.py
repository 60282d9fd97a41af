"""What a module does in one training step, without running it: ops on fake tensors.

`recorder` notes the ops of a step, of fake tensors or of a program that others list; `inputs` makes
what forward takes; `step` runs one step; `capture` makes a program of four steps.
"""
