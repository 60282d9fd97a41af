"""The graph of HugeCTR's training iteration, as its MLPerf submissions ran it.

May import all of the folder above but the other runtimes' builders; exchanges are TorchRec's.
"""
