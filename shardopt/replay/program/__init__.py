"""From a trace to programs: which ops, on which tensors, written as Python."""
