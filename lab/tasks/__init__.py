"""Sets of random tasks: drawn, planned, measured one after the other, and read back."""
