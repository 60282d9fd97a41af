"""Programs at other sizes than the trace's: more samples, more tables; imports `program`."""
