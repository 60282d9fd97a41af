"""The graph of HugeCTR's training iteration, as its MLPerf submissions ran it."""
