"""Hardware profiles: their schema, loading, overlays and the shipped files. May import `model`."""
