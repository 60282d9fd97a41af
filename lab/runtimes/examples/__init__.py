"""The graph of DLRM's training iteration in NVIDIA's DeepLearningExamples.

May import all of the folder above but the builders of other runtimes that are not TorchRec's.
"""
