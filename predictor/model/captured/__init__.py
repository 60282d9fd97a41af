"""The dense part of a captured module: its ops, with sizes that grow with the batch."""
