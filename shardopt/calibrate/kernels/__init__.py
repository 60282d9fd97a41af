"""The code that times one kind of kernel each. Imported by the ranks: all here needs torch."""
