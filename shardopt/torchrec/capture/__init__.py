"""What a module does in one training step, without running it: ops on fake tensors.

Imports `plan` and `training`; torch only in `recorder`, which others that list ops use, too.
"""
