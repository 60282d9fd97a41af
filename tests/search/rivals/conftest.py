"""Lets the tests of this folder import the `problems` of the one above."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
