"""Ranks train under TorchRec; without it none of these tests is collected."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torchrec") else ["*.py"]
