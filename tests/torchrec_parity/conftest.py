"""Without TorchRec there is nothing to compare with, and none of these tests is collected."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torchrec") else ["*.py"]
